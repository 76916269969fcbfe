// delimiter_rows on CUDA.
#include "delimiter.cuh"
#include "launch.h"

namespace pyruntime::cuda {
namespace {

std::tuple<Tensor, Tensor> delimiter_rows(const Tensor input_ids, const Tensor starts, int64_t delimiter) {
  check_cuda(input_ids, "input_ids");
  check_device_array(input_ids, "input_ids", input_ids, ScalarType::Long, {-1});
  const int64_t sequences = check_device_starts(starts, "starts", input_ids), count = input_ids.size(0);
  const torch::stable::accelerator::DeviceGuard guard(input_ids.get_device_index());
  Tensor rows = empty_beside(input_ids, {count}, ScalarType::Long);
  Tensor out_starts = empty_beside(input_ids, {sequences + 1}, ScalarType::Int);
  const cudaStream_t stream = current_stream(input_ids);
  const auto* ids = input_ids.const_data_ptr<int64_t>();
  const auto* begins = starts.const_data_ptr<int32_t>();
  auto* counts = out_starts.mutable_data_ptr<int32_t>();
  if (sequences > 0) {
    count_delimiters_kernel<<<blocks_of(sequences), kScanThreads, 0, stream>>>(ids, count, begins, delimiter,
                                                                               counts + 1);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
  scan_kernel<<<1, kScanThreads, 0, stream>>>(counts + 1, sequences, counts);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  if (sequences > 0) {
    delimiter_rows_kernel<<<blocks_of(sequences), kScanThreads, 0, stream>>>(ids, count, begins, delimiter, counts,
                                                                             rows.mutable_data_ptr<int64_t>());
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
  if (count > 0) {
    fill_rest_kernel<int64_t><<<std::min(blocks_of(count, kScanThreads), 128u), kScanThreads, 0, stream>>>(
        counts, sequences, count, -1, rows.mutable_data_ptr<int64_t>());
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
  return {rows, out_starts};
}

}  // namespace
}  // namespace pyruntime::cuda

STABLE_TORCH_LIBRARY_IMPL(pyruntime, CUDA, m) { m.impl("delimiter_rows", TORCH_BOX(&pyruntime::cuda::delimiter_rows)); }
