// What a layer of an encoder is made of, over raw rows: matrices, norms, and the memory between.
#pragma once

#include <algorithm>
#include <array>
#include <memory>

#include "../checks.h"
#include "dispatch.h"
#include "int8_rows.h"

namespace pyruntime::encoder {

// Memory of a thread that is kept from layer to layer: fresh pages cost as much as a twentieth of the products.
class Kept {
 public:
  // Until the next call, or while the answer lives where it is large.
  std::shared_ptr<Scratch> take(int64_t floats) {
    if (floats > kMost) return std::make_shared<Scratch>(floats);
    if (memory_ == nullptr || floats > size_) memory_ = std::make_shared<Scratch>(floats), size_ = floats;
    return memory_;
  }

 private:
  static constexpr int64_t kMost = 16 * 1024 * 1024;
  std::shared_ptr<Scratch> memory_;
  int64_t size_ = 0;
};

struct Rows {
  void* data;
  int64_t width;  // elements from one row to the next
};

// Weights in panels of sixteen columns, of the rows' dtype or int8, with a float bias.
struct Matrix {
  Matrix(const Tensor& w, const std::optional<Tensor>& b, const char* name, int64_t in, const Tensor& x)
      : weights(w.const_data_ptr()), columns(w.size(0) * 16), depth(in), is_int8(w.scalar_type() == ScalarType::Byte) {
    check_cpu(w, name);
    if (is_int8) {
      check_array(w, name, ScalarType::Byte, {-1, int8_panel(depth)});
    } else {
      const int64_t per = 4 / static_cast<int64_t>(x.element_size());
      check_same_dtype(w, name, x, "x");
      check_shape(w, name, {-1, (depth + per - 1) / per, 16, per});
      require(w.is_contiguous(), name, ": expected a contiguous tensor");
    }
    if (!b.has_value()) return;
    check_array(*b, name, ScalarType::Float, {columns});
    bias = b->const_data_ptr<float>();
  }

  const void* weights;
  const float* bias = nullptr;
  int64_t columns, depth;
  bool is_int8;
};

// A layer norm of what a half of the layer adds to its rows.
struct Norm {
  Norm(const Tensor& weight, const Tensor& bias, const char* name, double epsilon_, const Tensor& x)
      : epsilon(static_cast<float>(epsilon_)) {
    require(epsilon_ >= 0, name, ": epsilon must be at least 0, got ", epsilon_);
    for (const Tensor* t : {&weight, &bias}) {
      check_same_dtype(*t, name, x, "x");
      check_shape(*t, name, {x.size(1)});
      require(t->is_contiguous(), name, ": expected a contiguous tensor");
    }
    weights = weight.const_data_ptr(), biases = bias.const_data_ptr();
  }

  const void* weights;
  const void* biases;
  float epsilon;
};

struct Layer {
  DType dtype;
  int64_t size;  // bytes of an element
  std::array<Matrix, 3> heads;
  Matrix out, up, down;
  Norm attention_norm, mlp_norm;
  Activation activation;

  int64_t width() const { return out.columns; }
  bool is_int8() const { return out.is_int8; }

  // Floats that `count` elements take, whole cache lines.
  int64_t floats(int64_t count) const { return (count * size + 63) / 64 * 16; }
  // Floats of rows as int8 with their scales and zeros.
  int64_t quantized_floats(int64_t rows, int64_t depth) const { return is_int8() ? int8_floats(rows, depth) : 0; }

  QuantizeArgs quantized(const Rows& x, int64_t rows, int64_t depth, float* memory) const {
    return int8_rows(x.data, dtype, rows, depth, x.width, memory);
  }

  char* at(const Rows& x, int64_t row, int64_t column = 0) const {
    return static_cast<char*>(x.data) + (row * x.width + column) * size;
  }

  // Columns [begin, end) of rows [first, last): x, or `q` of them where weights are int8.
  void multiply(const Matrix& m, const Rows& x, const QuantizeArgs& q, const Rows& to, Activation act, int64_t first,
                int64_t last, int64_t begin, int64_t end) const {
    if (m.is_int8) {
      Int8Args a = int8_linear(q);
      a.w = static_cast<const uint8_t*>(m.weights), a.bias = m.bias, a.out = to.data, a.out_row = to.width;
      a.activation = act, a.columns = m.columns, a.row_begin = first, a.row_end = last;
      return kernels().linear_int8(a, begin / 16, end / 16);
    }
    PanelArgs p{};
    p.linear = {x.data, m.weights, m.bias, to.data, dtype, last, m.columns, m.depth, x.width, m.depth, to.width};
    p.packed = p.cached = true, p.activation = act, p.row_begin = first, p.row_end = last;
    kernels().panels(p, begin, end, nullptr);
  }

  void normalize(const Norm& norm, const Rows& x, const Rows& residual, const Rows& to, int64_t rows) const {
    NormArgs a{};
    a.x = x.data, a.residual = residual.data, a.weight = norm.weights, a.bias = norm.biases, a.out = to.data;
    a.dtype = dtype, a.centred = true, a.rows = rows, a.width = width();
    a.x_row = x.width, a.residual_row = residual.width, a.out_row = to.width, a.epsilon = norm.epsilon;
    kernels().normalize_rows(a, 0, rows);
  }
};

}  // namespace pyruntime::encoder
