// The ops that others are put together from, as they are registered.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <utility>
#include <vector>

#include "kernels/kernels.h"

namespace pyruntime {

using MaybeTensor = std::optional<torch::stable::Tensor>;

torch::stable::Tensor rms_norm(const torch::stable::Tensor x, const torch::stable::Tensor weight, double epsilon,
                               double weight_offset);
torch::stable::Tensor rotate_halves(const torch::stable::Tensor x, const torch::stable::Tensor cos,
                                    const torch::stable::Tensor sin);
torch::stable::Tensor linear_rows(const torch::stable::Tensor x, const torch::stable::Tensor w, const MaybeTensor bias,
                                  const MaybeTensor up, int64_t activation);
torch::stable::Tensor linear_panels(const torch::stable::Tensor x, const torch::stable::Tensor w,
                                    const MaybeTensor bias, const MaybeTensor up, int64_t activation);
// linear_panels of one x and several matrices with their biases.
std::vector<torch::stable::Tensor> linear_panels_of(
    const torch::stable::Tensor& x, const std::vector<std::pair<torch::stable::Tensor, MaybeTensor>>& matrices);
void store_kv(const torch::stable::Tensor k, const torch::stable::Tensor v, const torch::stable::Tensor slot_mapping,
              torch::stable::Tensor k_cache, torch::stable::Tensor v_cache);
torch::stable::Tensor paged_attention(const torch::stable::Tensor q, const torch::stable::Tensor k_cache,
                                      const torch::stable::Tensor v_cache, const torch::stable::Tensor query_starts,
                                      const torch::stable::Tensor kv_lengths, const torch::stable::Tensor block_tables,
                                      bool causal, double scale, int64_t window_left, double softcap,
                                      const MaybeTensor sinks);

// Attention as the arguments describe it, over the threads.
void launch_attention(const AttentionArgs& a, int64_t sequences);

// residual + x, or with a weight residual + rms_norm(x): what ends a half of a layer.
torch::stable::Tensor add_back(const torch::stable::Tensor residual, const torch::stable::Tensor x,
                               const MaybeTensor weight, double epsilon, double weight_offset);

// The layers that make_decoder_stack has given this number are let go.
void drop_decoder_stack(int64_t number);

}  // namespace pyruntime
