// What every launcher checks before it reads a value: device, dtype, shape, strides. Failures raise RuntimeError in
// Python.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <initializer_list>
#include <sstream>
#include <stdexcept>
#include <string>

#include "cpu/kernels/kernels.h"

namespace pyruntime {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <class... Parts>
void require(bool condition, const Parts&... parts) {
  if (condition) return;
  std::ostringstream message;
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

// Dtype and shape for a message. Written only when there is one: at few rows a layer's checks would else cost as much
// as some of its products.
struct Described {
  const Tensor& tensor;
};

inline Described describe(const Tensor& t) { return {t}; }

inline std::ostream& operator<<(std::ostream& out, const Described& described) {
  const Tensor& t = described.tensor;
  out << torch::headeronly::toString(t.scalar_type()) << " [";
  for (int64_t i = 0; i < t.dim(); ++i) out << (i ? ", " : "") << t.size(i);
  return out << "]";
}

// `shape` entries of -1 fit any size.
inline void check_shape(const Tensor& t, const char* name, std::initializer_list<int64_t> shape) {
  bool fits = t.dim() == static_cast<int64_t>(shape.size());
  int64_t i = 0;
  for (int64_t size : shape) {
    fits = fits && (size < 0 || t.size(i) == size);
    ++i;
  }
  if (fits) return;
  std::ostringstream wanted;
  i = 0;
  for (int64_t size : shape) {
    wanted << (i++ ? ", " : "");
    if (size < 0) {
      wanted << "any";
    } else {
      wanted << size;
    }
  }
  require(false, name, ": expected shape [", wanted.str(), "], got ", describe(t));
}

inline void check_cpu(const Tensor& t, const char* name) {
  require(t.defined(), name, ": expected a tensor, got None");
  require(t.is_cpu(), name, ": expected a CPU tensor");
}

// An index or parameter array: dense, on the CPU, of one dtype.
inline void check_array(const Tensor& t, const char* name, ScalarType dtype, std::initializer_list<int64_t> shape) {
  check_cpu(t, name);
  require(t.scalar_type() == dtype, name, ": expected dtype ", torch::headeronly::toString(dtype), ", got ",
          describe(t));
  check_shape(t, name, shape);
  require(t.is_contiguous(), name, ": expected a contiguous tensor");
}

inline DType check_floating(const Tensor& t, const char* name) {
  check_cpu(t, name);
  switch (t.scalar_type()) {
    case ScalarType::Float:
      return DType::kFloat32;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Half:
      return DType::kFloat16;
    default:
      require(false, name, ": expected float32, bfloat16 or float16, got ", describe(t));
  }
  return DType::kFloat32;
}

inline void check_same_dtype(const Tensor& t, const char* name, const Tensor& other, const char* other_name) {
  check_cpu(t, name);
  require(t.scalar_type() == other.scalar_type(), name, ": expected the dtype of ", other_name, " (",
          torch::headeronly::toString(other.scalar_type()), "), got ", describe(t));
}

inline void check_dense_rows(const Tensor& t, const char* name) {
  int64_t last = t.dim() - 1;
  require(t.size(last) <= 1 || t.stride(last) == 1, name, ": the last dimension must be contiguous");
}

// starts[0] = 0, never falling, starts[last] = total.
inline void check_starts(const Tensor& starts, const char* name, int64_t total) {
  check_array(starts, name, ScalarType::Int, {-1});
  int64_t count = starts.size(0);
  require(count >= 1, name, ": expected at least one entry");
  const int32_t* p = starts.const_data_ptr<int32_t>();
  require(p[0] == 0, name, ": must begin with 0, got ", p[0]);
  for (int64_t i = 1; i < count; ++i) {
    require(p[i] >= p[i - 1], name, ": must not fall, but entry ", i, " is ", p[i], " after ", p[i - 1]);
  }
  require(p[count - 1] == total, name, ": must end with the number of rows, ", total, ", got ", p[count - 1]);
}

constexpr size_t kMostDimensions = 4;

inline std::array<int64_t, kMostDimensions> dense_strides(std::initializer_list<int64_t> shape) {
  std::array<int64_t, kMostDimensions> strides{};
  require(shape.size() <= kMostDimensions, "expected at most ", kMostDimensions, " dimensions");
  int64_t step = 1;
  for (size_t i = shape.size(); i-- > 0; step *= std::max<int64_t>(1, shape.begin()[i])) strides[i] = step;
  return strides;
}

// Tensors come straight from the C interface: through the dispatcher a small one, or a view, costs as much as a norm of
// a few rows, and a decoder's layer makes twenty.
inline Tensor empty_cpu(std::initializer_list<int64_t> shape, ScalarType dtype) {
  const auto strides = dense_strides(shape);
  const auto type = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  AtenTensorHandle made = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(shape.size()), shape.begin(),
                                                         strides.data(), type, aoti_torch_device_type_cpu(), 0, &made));
  return Tensor(made);
}

// The elements of a contiguous tensor in another shape.
inline Tensor view_of(const Tensor& t, std::initializer_list<int64_t> shape) {
  int64_t count = 1;
  for (int64_t size : shape) count *= size;
  require(t.is_contiguous() && t.numel() == count, "expected a contiguous tensor of ", count, " elements, got ",
          describe(t));
  const auto strides = dense_strides(shape);
  AtenTensorHandle made = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(t.get(), static_cast<int64_t>(shape.size()),
                                                               shape.begin(), strides.data(), 0, &made));
  return Tensor(made);
}

}  // namespace pyruntime
