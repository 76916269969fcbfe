// linear_rows: checks and threads over the columns.
#include "linear.h"

#include "../checks.h"
#include "dispatch.h"

namespace pyruntime {

Product check_product(const Tensor& x, const char* x_name, const Tensor& w, const char* w_name,
                      const std::optional<Tensor>& bias) {
  Product product{};
  LinearArgs& a = product.args;
  a.dtype = check_floating(x, x_name);
  check_shape(x, x_name, {-1, -1});
  check_same_dtype(w, w_name, x, x_name);
  check_shape(w, w_name, {-1, x.size(1)});
  check_dense_rows(x, x_name);
  check_dense_rows(w, w_name);
  a.rows = x.size(0), a.columns = w.size(0), a.depth = x.size(1);
  require(a.depth >= 1, x_name, ": rows must be at least one wide, got ", describe(x));
  a.x = x.const_data_ptr(), a.w = w.const_data_ptr();
  a.x_row = x.stride(0), a.w_row = w.stride(0);
  if (!bias.has_value()) return product;
  check_floating(*bias, "bias");
  check_shape(*bias, "bias", {a.columns});
  // A bias is short beside the matrix; in float32 the kernels need one form of it.
  product.bias = torch::stable::contiguous(torch::stable::to(*bias, ScalarType::Float));
  a.bias = product.bias->const_data_ptr<float>();
  return product;
}

namespace {

Tensor linear_rows(const Tensor x, const Tensor w, const std::optional<Tensor> bias) {
  Product product = check_product(x, "x", w, "w", bias);
  LinearArgs& a = product.args;
  Tensor out = empty_cpu({a.rows, a.columns}, x.scalar_type());
  a.out = out.mutable_data_ptr();
  a.out_row = a.columns;
  // Chunks of whole column groups, small enough to even out the threads.
  constexpr int64_t kChunk = 128;
  if (a.rows == 0) return out;
  for_each_item((a.columns + kChunk - 1) / kChunk, [&] {
    return [&](int64_t i) { kernels().linear(a, i * kChunk, std::min(a.columns, (i + 1) * kChunk)); };
  });
  return out;
}

}  // namespace
}  // namespace pyruntime

STABLE_TORCH_LIBRARY_IMPL(pyruntime, CPU, m) { m.impl("linear_rows", TORCH_BOX(&pyruntime::linear_rows)); }
