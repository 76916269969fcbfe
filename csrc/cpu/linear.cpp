// linear_rows: checks and threads over the columns.
#include "linear.h"

#include <algorithm>

#include "../checks.h"
#include "dispatch.h"
#include "ops.h"

namespace pyruntime {

std::optional<Tensor> float_bias(const std::optional<Tensor>& bias, int64_t columns) {
  if (!bias.has_value()) return std::nullopt;
  check_floating(*bias, "bias");
  check_shape(*bias, "bias", {columns});
  return torch::stable::contiguous(torch::stable::to(*bias, ScalarType::Float));
}

Activation check_activation(int64_t activation) {
  require(activation >= 0 && activation <= 3, "activation: must be 0 (none), 1 (gelu), 2 (gelu_tanh) or 3 (silu), got ",
          activation);
  return static_cast<Activation>(activation);
}

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
  for_each_neighbour((columns + chunk - 1) / chunk,
                     [&](int64_t i) { work(i * chunk, std::min(columns, (i + 1) * chunk)); });
}

// `up` is a second matrix laid out as w, whose products the activated ones are multiplied with.
const void* check_up(const std::optional<Tensor>& up, const Tensor& w, const std::optional<Tensor>& bias) {
  if (!up.has_value()) return nullptr;
  check_same_dtype(*up, "up", w, "w");
  check_shape(*up, "up", {w.size(0), w.size(1)});
  require(up->stride(0) == w.stride(0) && (w.size(1) <= 1 || up->stride(1) == 1), "up: expected the strides of w");
  require(!bias.has_value(), "bias: not with up");
  return up->const_data_ptr();
}

char* column_of(const LinearArgs& a, const Tensor& t, int64_t column) {
  return static_cast<char*>(a.out) + column * static_cast<int64_t>(t.element_size());
}

}  // namespace

Tensor linear_rows(const Tensor x, const Tensor w, const std::optional<Tensor> bias, const std::optional<Tensor> up,
                   int64_t activation) {
  Product product = check_product(x, "x", w, "w", bias);
  LinearArgs& a = product.args;
  ActivateArgs activate{nullptr, nullptr, a.dtype, check_activation(activation), a.rows, 0, a.columns, a.columns};
  LinearArgs gated = a;
  gated.w = check_up(up, w, bias);
  Tensor out = empty_cpu({a.rows, a.columns}, x.scalar_type());
  Tensor ups = empty_cpu({up.has_value() ? a.rows : 0, a.columns}, x.scalar_type());
  a.out = out.mutable_data_ptr(), gated.out = ups.mutable_data_ptr();
  a.out_row = gated.out_row = a.columns;
  if (a.rows == 0) return out;
  for_each_chunk(a.columns, [&](int64_t begin, int64_t end) {
    kernels().linear(a, begin, end);
    if (up.has_value()) kernels().linear(gated, begin, end);
    if (!up.has_value() && activate.activation == Activation::kNone) return;
    ActivateArgs own = activate;
    own.columns = end - begin;
    own.y = column_of(a, x, begin), own.up = up.has_value() ? column_of(gated, x, begin) : nullptr;
    kernels().activate(own);
  });
  return out;
}

namespace {

// Rows and columns are cut so that a thread's rows stay in its cache and every thread finds several items.
void launch_panels(PanelArgs& p, int64_t words) {
  constexpr int64_t kMostRows = 512;
  const Kernels& table = kernels();
  const LinearArgs& a = p.linear;
  const int64_t width = table.panel_columns(p), panels = (a.columns + width - 1) / width;
  const int64_t row_blocks = (a.rows + kMostRows - 1) / kMostRows;
  const int64_t wanted = 8 * static_cast<int64_t>(torch::stable::get_num_threads());
  const int64_t run = std::clamp<int64_t>(panels * row_blocks / wanted, 1, 16);
  const int64_t runs = (panels + run - 1) / run;
  for_each_item(row_blocks * runs, [&] {
    return [&, buffer = std::make_shared<Scratch>(words)](int64_t i) {
      PanelArgs own = p;
      const int64_t block = i / runs, begin = i % runs * run * width;
      own.row_begin = a.rows * block / row_blocks, own.row_end = a.rows * (block + 1) / row_blocks;
      table.panels(own, begin, std::min(a.columns, begin + run * width), reinterpret_cast<uint32_t*>(buffer->get()));
    };
  });
}

}  // namespace

Tensor linear_panels(const Tensor x, const Tensor w, const std::optional<Tensor> bias, const std::optional<Tensor> up,
                     int64_t activation) {
  Product product = check_product(x, "x", w, "w", bias);
  PanelArgs p{product.args, check_up(up, w, bias), check_activation(activation), 0, 0};
  LinearArgs& a = p.linear;
  const int64_t words = kernels().panel_words(p);
  require(words > 0, "x: ", describe(x), " has no such kernel on this processor");
  Tensor out = empty_cpu({a.rows, a.columns}, x.scalar_type());
  a.out = out.mutable_data_ptr();
  a.out_row = a.columns;
  if (a.rows > 0 && a.columns > 0) launch_panels(p, words);
  return out;
}

namespace {

// Into memory that is there already: a fresh answer as large as a step's logits costs more in page faults than it takes
// to compute.
void linear_into(const Tensor x, const Tensor w, const std::optional<Tensor> bias, bool by_panels, Tensor out) {
  Product product = check_product(x, "x", w, "w", bias);
  PanelArgs p{product.args, nullptr, Activation::kNone, 0, 0};
  LinearArgs& a = p.linear;
  check_same_dtype(out, "out", x, "x");
  check_shape(out, "out", {a.rows, a.columns});
  check_dense_rows(out, "out");
  a.out = out.mutable_data_ptr();
  a.out_row = out.stride(0);
  if (a.rows == 0 || a.columns == 0) return;
  if (!by_panels) return for_each_chunk(a.columns, [&](int64_t b, int64_t e) { kernels().linear(a, b, e); });
  const int64_t words = kernels().panel_words(p);
  require(words > 0, "x: ", describe(x), " has no such kernel on this processor");
  launch_panels(p, words);
}

}  // namespace
}  // namespace pyruntime

STABLE_TORCH_LIBRARY_IMPL(pyruntime, CPU, m) {
  m.impl("linear_rows", TORCH_BOX(&pyruntime::linear_rows));
  m.impl("linear_panels", TORCH_BOX(&pyruntime::linear_panels));
  m.impl("linear_into", TORCH_BOX(&pyruntime::linear_into));
}
