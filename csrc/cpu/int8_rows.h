// Rows as int8 and the linear over them: what several linears of the same rows share is made once.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "dispatch.h"

namespace pyruntime {

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

 private:
  void launch(Int8Args& a) const;
  const uint8_t* check_matrix(const torch::stable::Tensor& w, const char* name, int64_t columns) const;

  QuantizeArgs rows_{};
  torch::headeronly::ScalarType dtype_;
  Scratch memory_;
};

}  // namespace pyruntime
