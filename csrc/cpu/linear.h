// Rows against a matrix of rows: what the linear and the scores check alike.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "kernels/kernels.h"

namespace pyruntime {

struct Product {
  LinearArgs args;
  std::optional<torch::stable::Tensor> bias;  // keeps args.bias alive
};

// x [R, K] and w [N, K] of one floating dtype, last dimension dense; bias [N] of any floating dtype. `out` is left
// unset.
Product check_product(const torch::stable::Tensor& x, const char* x_name, const torch::stable::Tensor& w,
                      const char* w_name, const std::optional<torch::stable::Tensor>& bias);

// The same for a matrix in panels, as PanelArgs says: [panels, words, 16, elements of a word].
Product check_packed(const torch::stable::Tensor& x, const torch::stable::Tensor& w,
                     const std::optional<torch::stable::Tensor>& bias);

// A bias is short beside the matrix; in float32 the kernels need one form of it.
std::optional<torch::stable::Tensor> float_bias(const std::optional<torch::stable::Tensor>& bias, int64_t columns);

Activation check_activation(int64_t activation);

}  // namespace pyruntime
