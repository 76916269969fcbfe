// pool on CUDA: check, guard the device, take torch's current stream, dispatch, launch, check the status. No
// synchronisation and no allocation but the answer's, so a graph can capture it.
#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>

#include "../checks.h"
#include "pool.cuh"

namespace pyruntime::cuda {
namespace {

void check_device_array(const Tensor& t, const char* name, const Tensor& beside, ScalarType dtype, int64_t count) {
  require(t.is_cuda() && t.get_device_index() == beside.get_device_index(), name,
          ": expected a tensor on the device of hidden");
  require(t.scalar_type() == dtype, name, ": expected dtype ", torch::headeronly::toString(dtype), ", got ",
          describe(t));
  check_shape(t, name, {count});
  require(t.is_contiguous(), name, ": expected a contiguous tensor");
}

template <class T>
void launch(const Tensor& hidden, const Tensor& starts, const Tensor& kinds, const Tensor& dimensions,
            const Tensor& normalize, Tensor& out, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(out.size(0)));
  pool_kernel<T><<<grid, kPoolThreads, 0, stream>>>(
      static_cast<const T*>(hidden.const_data_ptr()), hidden.stride(0), hidden.size(1), hidden.size(0),
      starts.const_data_ptr<int32_t>(), kinds.const_data_ptr<int32_t>(), dimensions.const_data_ptr<int32_t>(),
      normalize.const_data_ptr<bool>(), out.mutable_data_ptr<float>());
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

Tensor pool(const Tensor hidden, const Tensor starts, const Tensor kinds, const Tensor dimensions,
            const Tensor normalize) {
  require(hidden.is_cuda(), "hidden: expected a CUDA tensor");
  check_shape(hidden, "hidden", {-1, -1});
  check_dense_rows(hidden, "hidden");
  require(starts.dim() == 1 && starts.size(0) >= 1, "starts: expected at least one entry, got ", describe(starts));
  const int64_t sequences = starts.size(0) - 1;
  check_device_array(starts, "starts", hidden, ScalarType::Int, sequences + 1);
  check_device_array(kinds, "kinds", hidden, ScalarType::Int, sequences);
  check_device_array(dimensions, "dimensions", hidden, ScalarType::Int, sequences);
  check_device_array(normalize, "normalize", hidden, ScalarType::Bool, sequences);

  const torch::stable::accelerator::DeviceGuard guard(hidden.get_device_index());
  const int64_t shape[2] = {sequences, hidden.size(1)};
  Tensor out = torch::stable::empty({shape, 2}, ScalarType::Float, std::nullopt, hidden.device());
  if (sequences == 0) return out;
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(hidden.get_device_index(), &stream));
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  switch (hidden.scalar_type()) {
    case ScalarType::Float:
      launch<float>(hidden, starts, kinds, dimensions, normalize, out, cuda_stream);
      break;
    case ScalarType::BFloat16:
      launch<__nv_bfloat16>(hidden, starts, kinds, dimensions, normalize, out, cuda_stream);
      break;
    case ScalarType::Half:
      launch<__half>(hidden, starts, kinds, dimensions, normalize, out, cuda_stream);
      break;
    default:
      require(false, "hidden: expected float32, bfloat16 or float16, got ", describe(hidden));
  }
  return out;
}

}  // namespace
}  // namespace pyruntime::cuda

STABLE_TORCH_LIBRARY_IMPL(pyruntime, CUDA, m) { m.impl("pool", TORCH_BOX(&pyruntime::cuda::pool)); }
