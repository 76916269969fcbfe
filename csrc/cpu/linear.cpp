// linear_rows: checks and threads over the columns.
#include "linear.h"

#include <algorithm>

#include "../checks.h"
#include "dispatch.h"

namespace pyruntime {
namespace {

// A bias is short beside the matrix; in float32 the kernels need one form of it.
std::optional<Tensor> float_bias(const std::optional<Tensor>& bias, int64_t columns) {
  if (!bias.has_value()) return std::nullopt;
  check_floating(*bias, "bias");
  check_shape(*bias, "bias", {columns});
  return torch::stable::contiguous(torch::stable::to(*bias, ScalarType::Float));
}

}  // namespace

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
  product.bias = float_bias(bias, a.columns);
  if (product.bias.has_value()) a.bias = product.bias->const_data_ptr<float>();
  return product;
}

namespace {

// work(begin, end) over all columns in chunks of whole groups: several a thread, to even them out, yet long runs of
// memory where there is much of it.
template <class Work>
void for_each_chunk(int64_t columns, const Work& work) {
  const int64_t shares = 8 * static_cast<int64_t>(torch::stable::get_num_threads());
  const int64_t chunk = std::clamp<int64_t>(columns / shares / 16 * 16, 16, 1024);
  for_each_item((columns + chunk - 1) / chunk,
                [&] { return [&](int64_t i) { work(i * chunk, std::min(columns, (i + 1) * chunk)); }; });
}

Tensor linear_rows(const Tensor x, const Tensor w, const std::optional<Tensor> bias) {
  Product product = check_product(x, "x", w, "w", bias);
  LinearArgs& a = product.args;
  Tensor out = empty_cpu({a.rows, a.columns}, x.scalar_type());
  a.out = out.mutable_data_ptr();
  a.out_row = a.columns;
  if (a.rows == 0) return out;
  for_each_chunk(a.columns, [&](int64_t begin, int64_t end) { kernels().linear(a, begin, end); });
  return out;
}

Tensor linear_rows_int8(const Tensor x, const Tensor w, const Tensor scales, const std::optional<Tensor> bias) {
  QuantizedArgs a{};
  LinearArgs& l = a.linear;
  l.dtype = check_floating(x, "x");
  check_shape(x, "x", {-1, -1});
  check_dense_rows(x, "x");
  check_cpu(w, "w");
  require(w.scalar_type() == ScalarType::Char, "w: expected int8, got ", describe(w));
  check_shape(w, "w", {-1, x.size(1)});
  check_dense_rows(w, "w");
  l.rows = x.size(0), l.columns = w.size(0), l.depth = x.size(1);
  require(l.depth >= 1, "x: rows must be at least one wide, got ", describe(x));
  check_array(scales, "scales", ScalarType::Float, {l.columns});
  a.scales = scales.const_data_ptr<float>();
  l.x = x.const_data_ptr(), l.w = w.const_data_ptr();
  l.x_row = x.stride(0), l.w_row = w.stride(0);
  const std::optional<Tensor> kept = float_bias(bias, l.columns);
  if (kept.has_value()) l.bias = kept->const_data_ptr<float>();
  Tensor out = empty_cpu({l.rows, l.columns}, x.scalar_type());
  l.out = out.mutable_data_ptr();
  l.out_row = l.columns;
  if (l.rows == 0) return out;
  for_each_chunk(l.columns, [&](int64_t begin, int64_t end) { kernels().linear_int8(a, begin, end); });
  return out;
}

}  // namespace
}  // namespace pyruntime

STABLE_TORCH_LIBRARY_IMPL(pyruntime, CPU, m) {
  m.impl("linear_rows", TORCH_BOX(&pyruntime::linear_rows));
  m.impl("linear_rows_int8", TORCH_BOX(&pyruntime::linear_rows_int8));
}
