// pool_sparse and lexical_weights on CUDA.
#include "sparse.cuh"

#include "product.h"

namespace pyruntime::cuda {
namespace {

Tensor pool_sparse(const Tensor hidden, const Tensor starts, const Tensor weight, const Optional bias) {
  check_product(hidden, "hidden", weight, bias);
  const int64_t sequences = check_device_starts(starts, "starts", hidden);
  const torch::stable::accelerator::DeviceGuard guard(hidden.get_device_index());
  Tensor out = empty_beside(hidden, {sequences, weight.size(0)}, ScalarType::Float);
  if (sequences == 0 || weight.size(0) == 0) return out;
  const dim3 grid(blocks_of(sequences), blocks_along_y(weight.size(0), kTileColumns));
  dispatch(hidden, [&](auto element) {
    using T = decltype(element);
    // Short texts would leave most of a tall tile idle; the sums are the same bits in both.
    const auto kernel = hidden.size(0) <= 16 * sequences ? pool_sparse_kernel<T, 8> : pool_sparse_kernel<T, 64>;
    kernel<<<grid, kProductThreads, 0, current_stream(hidden)>>>(
        product_arguments<T>(hidden, weight, bias), starts.const_data_ptr<int32_t>(), out.mutable_data_ptr<float>());
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return out;
}

// The kernels after the dots: best weight of each id, how many there are, where they go.
void write_pairs(const LexicalArguments& a, const float* weights, float* best, int32_t* starts, int64_t* ids,
                 float* out, cudaStream_t stream) {
  const unsigned sequences = blocks_of(a.sequences);
  if (a.sequences > 0) {
    lexical_best_kernel<<<sequences, kScanThreads, 0, stream>>>(a, weights, best, starts + 1);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
  scan_kernel<<<1, kScanThreads, 0, stream>>>(starts + 1, a.sequences, starts);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  if (a.rows == 0) return;
  if (a.sequences > 0) {
    lexical_write_kernel<<<sequences, kScanThreads, 0, stream>>>(a, best, starts, ids, out);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
  const unsigned rest = std::min(blocks_of(a.rows, kScanThreads), 128u);
  fill_rest_kernel<int64_t><<<rest, kScanThreads, 0, stream>>>(starts, a.sequences, a.rows, -1, ids);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  fill_rest_kernel<float><<<rest, kScanThreads, 0, stream>>>(starts, a.sequences, a.rows, 0.0f, out);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

std::tuple<Tensor, Tensor, Tensor> lexical_weights(const Tensor hidden, const Tensor starts, const Tensor token_ids,
                                                   const Tensor weight, double bias, const Tensor skip) {
  check_matrix(hidden, "hidden");
  const int64_t sequences = check_device_starts(starts, "starts", hidden), rows = hidden.size(0);
  check_device_array(token_ids, "token_ids", hidden, ScalarType::Long, {rows});
  check_device_array(weight, "weight", hidden, hidden.scalar_type(), {hidden.size(1)});
  check_device_array(skip, "skip", hidden, ScalarType::Long, {-1});
  const torch::stable::accelerator::DeviceGuard guard(hidden.get_device_index());
  Tensor ids = empty_beside(hidden, {rows}, ScalarType::Long);
  Tensor weights = empty_beside(hidden, {rows}, ScalarType::Float);
  Tensor out_starts = empty_beside(hidden, {sequences + 1}, ScalarType::Int);
  const Tensor workspace = empty_beside(hidden, {2, rows}, ScalarType::Float);
  auto* dots = static_cast<float*>(workspace.mutable_data_ptr());
  const cudaStream_t stream = current_stream(hidden);
  const LexicalArguments a{starts.const_data_ptr<int32_t>(),
                           token_ids.const_data_ptr<int64_t>(),
                           skip.const_data_ptr<int64_t>(),
                           rows,
                           hidden.size(1),
                           hidden.stride(0),
                           skip.size(0),
                           sequences,
                           static_cast<float>(bias)};
  if (rows > 0) {
    dispatch(hidden, [&](auto element) {
      using T = decltype(element);
      lexical_dot_kernel<T><<<blocks_of(rows, kScanThreads / kWarp), kScanThreads, 0, stream>>>(
          static_cast<const T*>(hidden.const_data_ptr()), static_cast<const T*>(weight.const_data_ptr()), a, dots);
    });
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
  write_pairs(a, dots, dots + rows, out_starts.mutable_data_ptr<int32_t>(), ids.mutable_data_ptr<int64_t>(),
              weights.mutable_data_ptr<float>(), stream);
  return {ids, weights, out_starts};
}

}  // namespace
}  // namespace pyruntime::cuda

STABLE_TORCH_LIBRARY_IMPL(pyruntime, CUDA, m) {
  m.impl("pool_sparse", TORCH_BOX(&pyruntime::cuda::pool_sparse));
  m.impl("lexical_weights", TORCH_BOX(&pyruntime::cuda::lexical_weights));
}
