// Rows as int8, how they lie, and the linear over them: what several linears of the same rows share is made once.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "dispatch.h"

namespace pyruntime {

inline int64_t int8_groups(int64_t depth) { return (depth + kInt8Group - 1) / kInt8Group; }

// Words of four int8 of a column of a matrix.
inline int64_t int8_words(int64_t depth) { return (depth + 3) / 4; }

// Bytes of a panel of sixteen columns.
inline int64_t int8_panel(int64_t depth) { return 64 * (int8_words(depth) + int8_groups(depth)); }

// Floats that rows take as int8.
inline int64_t int8_floats(int64_t rows, int64_t depth) { return rows * int8_groups(depth) * (kInt8Group / 4 + 2); }

// What makes rows int8 in `memory` of int8_floats: their groups, behind them the scales of all, then the zeros.
inline QuantizeArgs int8_rows(const void* x, DType dtype, int64_t rows, int64_t depth, int64_t x_row, float* memory) {
  QuantizeArgs a{};
  a.x = x, a.dtype = dtype, a.rows = rows, a.depth = depth, a.x_row = x_row, a.groups = int8_groups(depth);
  a.q = reinterpret_cast<uint8_t*>(memory), a.q_row = a.groups * kInt8Group;
  a.row_scales = memory + rows * a.groups * (kInt8Group / 4);
  a.zeros = a.row_scales + rows * a.groups;
  return a;
}

// A linear over all of them, as far as they determine it.
inline Int8Args int8_linear(const QuantizeArgs& rows) {
  Int8Args a{};
  a.q = rows.q, a.row_scales = rows.row_scales, a.zeros = rows.zeros, a.dtype = rows.dtype;
  a.q_row = rows.q_row, a.groups = rows.groups, a.words = int8_words(rows.depth), a.row_end = rows.rows;
  return a;
}

class Int8Rows {
 public:
  // x [R, K] of a floating dtype, last dimension dense.
  explicit Int8Rows(const torch::stable::Tensor& x);

  // activation(x · wᵀ + bias) of `columns` columns, times x · upᵀ where there is `up`; w and up as Int8Args says.
  torch::stable::Tensor multiply(const torch::stable::Tensor& w, int64_t columns,
                                 const std::optional<torch::stable::Tensor>& bias,
                                 const std::optional<torch::stable::Tensor>& up, int64_t activation) const;
  void multiply_into(const torch::stable::Tensor& w, const std::optional<torch::stable::Tensor>& bias,
                     torch::stable::Tensor& out) const;

  // The rows as kernels take them, as long as this lives.
  const QuantizeArgs& rows() const { return rows_; }
  const uint8_t* check_matrix(const torch::stable::Tensor& w, const char* name, int64_t columns) const;

 private:
  QuantizeArgs rows_{};
  torch::headeronly::ScalarType dtype_;
  Scratch memory_;
};

}  // namespace pyruntime
