// linear_int8: checks, the rows' conversion, and threads over panels of columns and blocks of rows.
#include <algorithm>

#include "../checks.h"
#include "int8_rows.h"
#include "linear.h"

namespace pyruntime {
namespace {

// Memory for rows that have been checked.
int64_t floats_of(const Tensor& x) {
  check_floating(x, "x");
  check_shape(x, "x", {-1, -1});
  check_dense_rows(x, "x");
  require(x.size(1) >= 1, "x: rows must be at least one wide, got ", describe(x));
  return int8_floats(x.size(0), x.size(1));
}

// Rows are cut so that a thread's stay in its cache, panels in runs that lie in one piece: several a thread, to even
// them out, and whole triples, which are multiplied together.
void launch(const Int8Args& a) {
  constexpr int64_t kMostRows = 512;
  const int64_t panels = (a.columns + 15) / 16, rows = a.row_end;
  if (rows == 0 || panels == 0) return;
  const int64_t blocks = (rows + kMostRows - 1) / kMostRows;
  const int64_t wanted = 8 * static_cast<int64_t>(torch::stable::get_num_threads());
  const int64_t run = std::clamp<int64_t>(panels * blocks / wanted / 3, 1, 21) * 3, runs = (panels + run - 1) / run;
  for_each_neighbour(blocks * runs, [&](int64_t i) {
    Int8Args own = a;
    const int64_t block = i / runs, begin = i % runs * run;
    own.row_begin = rows * block / blocks, own.row_end = rows * (block + 1) / blocks;
    kernels().linear_int8(own, begin, std::min(panels, begin + run));
  });
}

}  // namespace

Int8Rows::Int8Rows(const Tensor& x) : dtype_(x.scalar_type()), memory_(floats_of(x)) {
  const DType dtype = check_floating(x, "x");
  rows_ = int8_rows(x.const_data_ptr(), dtype, x.size(0), x.size(1), x.stride(0), memory_.get());
  const QuantizeArgs& a = rows_;
  // On one thread where there is little to do: waking the others costs more than this.
  constexpr int64_t kAlone = 16384;
  if (a.rows * a.depth <= kAlone) {
    kernels().quantize_rows(a, 0, a.rows);
    return;
  }
  const int64_t block = std::max<int64_t>(1, kAlone / a.depth);
  for_each_item((a.rows + block - 1) / block, [&] {
    return [&](int64_t i) { kernels().quantize_rows(a, i * block, std::min(a.rows, (i + 1) * block)); };
  });
}

const uint8_t* Int8Rows::check_matrix(const Tensor& w, const char* name, int64_t columns) const {
  require(columns >= 0, "columns: must be at least 0, got ", columns);
  check_array(w, name, ScalarType::Byte, {(columns + 15) / 16, int8_panel(rows_.depth)});
  return w.const_data_ptr<uint8_t>();
}

Tensor Int8Rows::multiply(const Tensor& w, int64_t columns, const std::optional<Tensor>& bias,
                          const std::optional<Tensor>& up, int64_t activation) const {
  Int8Args a = int8_linear(rows_);
  a.w = check_matrix(w, "w", columns), a.columns = columns;
  if (up.has_value()) a.up = check_matrix(*up, "up", columns);
  require(!up.has_value() || !bias.has_value(), "bias: not with up");
  a.activation = check_activation(activation);
  const std::optional<Tensor> kept = float_bias(bias, columns);
  if (kept.has_value()) a.bias = kept->const_data_ptr<float>();
  Tensor out = empty_cpu({rows_.rows, columns}, dtype_);
  a.out = out.mutable_data_ptr(), a.out_row = columns;
  launch(a);
  return out;
}

void Int8Rows::multiply_into(const Tensor& w, const std::optional<Tensor>& bias, Tensor& out) const {
  require(out.scalar_type() == dtype_, "out: expected the dtype of x, got ", describe(out));
  check_cpu(out, "out");
  check_shape(out, "out", {rows_.rows, -1});
  check_dense_rows(out, "out");
  Int8Args a = int8_linear(rows_);
  a.columns = out.size(1), a.w = check_matrix(w, "w", a.columns);
  const std::optional<Tensor> kept = float_bias(bias, a.columns);
  if (kept.has_value()) a.bias = kept->const_data_ptr<float>();
  a.out = out.mutable_data_ptr(), a.out_row = out.stride(0);
  launch(a);
}

namespace {

Tensor linear_int8(const Tensor x, const Tensor w, int64_t columns, const std::optional<Tensor> bias,
                   const std::optional<Tensor> up, int64_t activation) {
  return Int8Rows(x).multiply(w, columns, bias, up, activation);
}

void linear_int8_into(const Tensor x, const Tensor w, const std::optional<Tensor> bias, Tensor out) {
  Int8Rows(x).multiply_into(w, bias, out);
}

}  // namespace
}  // namespace pyruntime

STABLE_TORCH_LIBRARY_IMPL(pyruntime, CPU, m) {
  m.impl("linear_int8", TORCH_BOX(&pyruntime::linear_int8));
  m.impl("linear_int8_into", TORCH_BOX(&pyruntime::linear_int8_into));
}
