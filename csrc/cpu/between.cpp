// rms_norm, layer_norm and rotate_halves: what lies between a body's linears, one op each for what are ten in plain
// torch.
#include <algorithm>

#include "../checks.h"
#include "dispatch.h"
#include "ops.h"

namespace pyruntime {
namespace {

// work(begin, end) over rows, on one thread where there is little to do: waking the others costs more than this.
template <class Work>
void for_each_row_block(int64_t rows, int64_t width, const Work& work) {
  constexpr int64_t kAlone = 16384;  // elements
  if (rows * width <= kAlone) return work(int64_t{0}, rows);
  const int64_t shares = 4 * static_cast<int64_t>(torch::stable::get_num_threads());
  const int64_t block = std::max<int64_t>(1, (rows + shares - 1) / shares);
  for_each_item((rows + block - 1) / block,
                [&] { return [&](int64_t i) { work(i * block, std::min(rows, (i + 1) * block)); }; });
}

// x and what goes with it: [R, W] rows and [W] parameters of one dtype.
NormArgs describe_rows(const Tensor& x, double epsilon) {
  NormArgs a{};
  a.dtype = check_floating(x, "x");
  check_shape(x, "x", {-1, -1});
  check_dense_rows(x, "x");
  a.rows = x.size(0), a.width = x.size(1);
  require(a.width >= 1, "x: rows must be at least one wide, got ", describe(x));
  require(epsilon >= 0, "epsilon: must be at least 0, got ", epsilon);
  a.x = x.const_data_ptr(), a.x_row = x.stride(0);
  a.epsilon = static_cast<float>(epsilon);
  return a;
}

const void* parameter(const std::optional<Tensor>& t, const char* name, const Tensor& x) {
  if (!t.has_value()) return nullptr;
  check_same_dtype(*t, name, x, "x");
  check_shape(*t, name, {x.size(1)});
  require(t->is_contiguous(), name, ": expected a contiguous tensor");
  return t->const_data_ptr();
}

void set_residual(NormArgs& a, const Tensor& residual, const Tensor& x) {
  check_same_dtype(residual, "residual", x, "x");
  check_shape(residual, "residual", {a.rows, a.width});
  check_dense_rows(residual, "residual");
  a.residual = residual.const_data_ptr(), a.residual_row = residual.stride(0);
}

Tensor run(NormArgs& a, const Tensor& x) {
  Tensor out = empty_cpu({a.rows, a.width}, x.scalar_type());
  a.out = out.mutable_data_ptr(), a.out_row = a.width;
  for_each_row_block(a.rows, a.width, [&](int64_t begin, int64_t end) { kernels().normalize_rows(a, begin, end); });
  return out;
}

}  // namespace

Tensor rms_norm(const Tensor x, const Tensor weight, double epsilon, double weight_offset) {
  NormArgs a = describe_rows(x, epsilon);
  a.weight = parameter(weight, "weight", x);
  a.weight_offset = static_cast<float>(weight_offset);
  return run(a, x);
}

Tensor add_back(const Tensor residual, const Tensor x, const MaybeTensor weight, double epsilon, double weight_offset) {
  NormArgs a = describe_rows(x, epsilon);
  a.weight = parameter(weight, "weight", x);
  a.weight_offset = static_cast<float>(weight_offset);
  set_residual(a, residual, x);
  return run(a, x);
}

namespace {

Tensor layer_norm(const Tensor x, const std::optional<Tensor> residual, const std::optional<Tensor> weight,
                  const std::optional<Tensor> bias, double epsilon) {
  NormArgs a = describe_rows(x, epsilon);
  a.centred = true;
  a.weight = parameter(weight, "weight", x), a.bias = parameter(bias, "bias", x);
  if (residual.has_value()) set_residual(a, *residual, x);
  return run(a, x);
}

}  // namespace

Tensor rotate_halves(const Tensor x, const Tensor cos, const Tensor sin) {
  RotateArgs a{};
  a.dtype = check_floating(x, "x");
  check_shape(x, "x", {-1, -1, -1});
  check_dense_rows(x, "x");
  a.tokens = x.size(0), a.heads = x.size(1), a.width = x.size(2);
  require(a.width >= 2 && a.width % 2 == 0, "x: expected an even width of at least 2, got ", describe(x));
  for (const auto& [t, name] : {std::pair{&cos, "cos"}, std::pair{&sin, "sin"}}) {
    check_same_dtype(*t, name, x, "x");
    check_shape(*t, name, {a.tokens, a.width});
    check_dense_rows(*t, name);
    require(t->stride(0) == cos.stride(0), name, ": expected the strides of cos");
  }
  a.x = x.const_data_ptr(), a.cos = cos.const_data_ptr(), a.sin = sin.const_data_ptr();
  a.x_row = x.stride(0), a.x_head = x.stride(1), a.angle_row = cos.stride(0);
  Tensor out = empty_cpu({a.tokens, a.heads, a.width}, x.scalar_type());
  a.out = out.mutable_data_ptr();
  for_each_row_block(a.tokens, a.heads * a.width, [&](int64_t begin, int64_t end) { kernels().rotate(a, begin, end); });
  return out;
}

}  // namespace pyruntime

STABLE_TORCH_LIBRARY_IMPL(pyruntime, CPU, m) {
  m.impl("rms_norm", TORCH_BOX(&pyruntime::rms_norm));
  m.impl("layer_norm", TORCH_BOX(&pyruntime::layer_norm));
  m.impl("rotate_halves", TORCH_BOX(&pyruntime::rotate_halves));
}
