// linear_rows: checks and threads over the columns.
#include "linear.h"

#include <algorithm>
#include <vector>

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

Product check_packed(const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias) {
  Product product{};
  LinearArgs& a = product.args;
  a.dtype = check_floating(x, "x");
  check_shape(x, "x", {-1, -1});
  check_dense_rows(x, "x");
  check_same_dtype(w, "w", x, "x");
  a.rows = x.size(0), a.columns = w.size(0) * 16, a.depth = x.size(1);
  require(a.depth >= 1, "x: rows must be at least one wide, got ", describe(x));
  const int64_t per = 4 / static_cast<int64_t>(x.element_size());
  check_shape(w, "w", {-1, (a.depth + per - 1) / per, 16, per});
  require(w.is_contiguous(), "w: expected a contiguous tensor");
  a.x = x.const_data_ptr(), a.w = w.const_data_ptr();
  a.x_row = x.stride(0);
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
  if (w.dim() == 2) {
    check_shape(*up, "up", {w.size(0), w.size(1)});
  } else {
    check_shape(*up, "up", {w.size(0), w.size(1), w.size(2), w.size(3)});
  }
  for (int64_t i = 0; i < w.dim(); ++i) {
    require(w.size(i) <= 1 || up->stride(i) == w.stride(i), "up: expected the strides of w");
  }
  require(!bias.has_value(), "bias: not with up");
  return up->const_data_ptr();
}

char* column_of(const LinearArgs& a, const Tensor& t, int64_t column) {
  return static_cast<char*>(a.out) + column * static_cast<int64_t>(t.element_size());
}

void launch_rows(const PanelArgs& p, const Tensor& x) {
  const LinearArgs& a = p.linear;
  LinearArgs gated = a;
  const Tensor ups = empty_cpu({p.up != nullptr ? a.rows : 0, a.columns}, x.scalar_type());
  gated.w = p.up, gated.out = ups.mutable_data_ptr(), gated.out_row = a.columns;
  for_each_chunk(a.columns, [&](int64_t begin, int64_t end) {
    kernels().linear(a, begin, end);
    if (p.up != nullptr) kernels().linear(gated, begin, end);
    if (p.up == nullptr && p.activation == Activation::kNone) return;
    const void* up = p.up != nullptr ? column_of(gated, x, begin) : nullptr;
    kernels().activate({column_of(a, x, begin), up, a.dtype, p.activation, a.rows, end - begin, a.out_row, a.columns});
  });
}

// How a product by panels is cut: blocks of rows that stay in a thread's cache, times runs of panels, several a thread,
// of about one size and neighbours in memory.
struct Cut {
  explicit Cut(const PanelArgs& p) : panels((p.linear.columns + 15) / 16) {
    constexpr int64_t kMostRows = 512;
    const int64_t width = kernels().panel_columns(p), tiles = (p.linear.columns + width - 1) / width;
    const int64_t threads = static_cast<int64_t>(torch::stable::get_num_threads());
    row_blocks = (p.linear.rows + kMostRows - 1) / kMostRows;
    const int64_t run = std::clamp<int64_t>(tiles * row_blocks / (32 * threads), 1, 16);
    runs = std::min(panels, ((tiles + run - 1) / run + threads - 1) / threads * threads);
  }
  int64_t count() const { return row_blocks * runs; }

  void compute(const PanelArgs& p, int64_t item, float* memory) const {
    PanelArgs own = p;
    const int64_t block = item / runs, run = item % runs;
    own.row_begin = p.linear.rows * block / row_blocks, own.row_end = p.linear.rows * (block + 1) / row_blocks;
    kernels().panels(own, panels * run / runs * 16, std::min(p.linear.columns, panels * (run + 1) / runs * 16),
                     reinterpret_cast<uint32_t*>(memory));
  }

  int64_t panels, row_blocks, runs;
};

// All of them at once, which wakes the threads once.
void launch_panels(const std::vector<PanelArgs>& all) {
  std::vector<Cut> cuts;
  std::vector<int64_t> ends;
  int64_t words = 0;
  for (const PanelArgs& p : all) {
    cuts.emplace_back(p);
    ends.push_back((ends.empty() ? 0 : ends.back()) + cuts.back().count());
    words = p.packed ? words : std::max(words, kernels().panel_words(p));
  }
  for_each_neighbour_of(ends.back(), [&] {
    return [&, memory = std::make_shared<Scratch>(words)](int64_t i) {
      const size_t at = static_cast<size_t>(std::upper_bound(ends.begin(), ends.end(), i) - ends.begin());
      cuts[at].compute(all[at], at == 0 ? i : i - ends[at - 1], memory->get());
    };
  });
}

struct Request {
  Product product;
  PanelArgs args;  // of the product, but for its answer
};

Request check_request(const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias,
                      const std::optional<Tensor>& up, int64_t activation, bool by_panels) {
  const bool packed = by_panels && w.dim() == 4;
  Request r{packed ? check_packed(x, w, bias) : check_product(x, "x", w, "w", bias), {}};
  r.args = {r.product.args, check_up(up, w, bias), packed, check_activation(activation), 0, 0};
  require(!by_panels || kernels().panel_words(r.args) > 0, "x: ", describe(x), " has no such kernel on this processor");
  return r;
}

// Into `out`, [rows, columns] of the rows' dtype. False: there is nothing to compute.
bool set_out(PanelArgs& p, Tensor& out) {
  p.linear.out = out.mutable_data_ptr();
  p.linear.out_row = out.stride(0);
  return p.linear.rows > 0 && p.linear.columns > 0;
}

Tensor answer_of(const PanelArgs& p, const Tensor& x) {
  return empty_cpu({p.linear.rows, p.linear.columns}, x.scalar_type());
}

}  // namespace

Tensor linear_rows(const Tensor x, const Tensor w, const std::optional<Tensor> bias, const std::optional<Tensor> up,
                   int64_t activation) {
  Request r = check_request(x, w, bias, up, activation, false);
  Tensor out = answer_of(r.args, x);
  if (set_out(r.args, out)) launch_rows(r.args, x);
  return out;
}

Tensor linear_panels(const Tensor x, const Tensor w, const std::optional<Tensor> bias, const std::optional<Tensor> up,
                     int64_t activation) {
  Request r = check_request(x, w, bias, up, activation, true);
  Tensor out = answer_of(r.args, x);
  if (set_out(r.args, out)) launch_panels({r.args});
  return out;
}

std::vector<Tensor> linear_panels_of(const Tensor& x, const std::vector<std::pair<Tensor, MaybeTensor>>& matrices) {
  std::vector<Request> requests;
  std::vector<Tensor> answers;
  std::vector<PanelArgs> all;
  for (const auto& [w, bias] : matrices) {
    requests.push_back(check_request(x, w, bias, std::nullopt, 0, true));
    PanelArgs& p = requests.back().args;
    answers.push_back(answer_of(p, x));
    if (set_out(p, answers.back())) all.push_back(p);
  }
  if (!all.empty()) launch_panels(all);
  return answers;
}

namespace {

// Into memory that is there already: a fresh answer as large as a step's logits costs more in page faults than it takes
// to compute.
void linear_into(const Tensor x, const Tensor w, const std::optional<Tensor> bias, bool by_panels, Tensor out) {
  Request r = check_request(x, w, bias, std::nullopt, 0, by_panels);
  check_same_dtype(out, "out", x, "x");
  check_shape(out, "out", {r.args.linear.rows, r.args.linear.columns});
  check_dense_rows(out, "out");
  if (!set_out(r.args, out)) return;
  by_panels ? launch_panels({r.args}) : launch_rows(r.args, x);
}

}  // namespace
}  // namespace pyruntime

STABLE_TORCH_LIBRARY_IMPL(pyruntime, CPU, m) {
  m.impl("linear_rows", TORCH_BOX(&pyruntime::linear_rows));
  m.impl("linear_panels", TORCH_BOX(&pyruntime::linear_panels));
  m.impl("linear_into", TORCH_BOX(&pyruntime::linear_into));
}
