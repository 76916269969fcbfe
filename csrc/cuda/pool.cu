// pool on CUDA.
#include "launch.h"
#include "pool.cuh"

namespace pyruntime::cuda {
namespace {

Tensor pool(const Tensor hidden, const Tensor starts, const Tensor kinds, const Tensor dimensions,
            const Tensor normalize, const Optional rows) {
  check_matrix(hidden, "hidden");
  const int64_t sequences = check_device_starts(starts, "starts", hidden);
  check_device_array(kinds, "kinds", hidden, ScalarType::Int, {sequences});
  check_device_array(dimensions, "dimensions", hidden, ScalarType::Int, {sequences});
  check_device_array(normalize, "normalize", hidden, ScalarType::Bool, {sequences});
  if (rows.has_value()) check_device_array(*rows, "rows", hidden, ScalarType::Long, {sequences});

  const torch::stable::accelerator::DeviceGuard guard(hidden.get_device_index());
  Tensor out = empty_beside(hidden, {sequences, hidden.size(1)}, ScalarType::Float);
  if (sequences == 0) return out;
  const PoolArguments a{hidden.stride(0),
                        hidden.size(1),
                        hidden.size(0),
                        starts.const_data_ptr<int32_t>(),
                        kinds.const_data_ptr<int32_t>(),
                        dimensions.const_data_ptr<int32_t>(),
                        normalize.const_data_ptr<bool>(),
                        optional_data<int64_t>(rows),
                        out.mutable_data_ptr<float>()};
  dispatch(hidden, [&](auto element) {
    using T = decltype(element);
    pool_kernel<T><<<blocks_of(sequences), kPoolThreads, 0, current_stream(hidden)>>>(
        static_cast<const T*>(hidden.const_data_ptr()), a);
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return out;
}

}  // namespace
}  // namespace pyruntime::cuda

STABLE_TORCH_LIBRARY_IMPL(pyruntime, CUDA, m) { m.impl("pool", TORCH_BOX(&pyruntime::cuda::pool)); }
