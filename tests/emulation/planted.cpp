// Faults planted on purpose: the tests show that the emulation and its sanitizers find each.
#include "registry.h"

#include "../../csrc/cuda/primitives.cuh"

namespace pyruntime::cuda {
namespace {

constexpr int kThreads = 128;

// out[i] = in[(i + 1) % n] through shared memory, for blocks of kThreads.
template <bool Barrier>
__global__ void rotate_kernel(const float* in, float* out) {
  __shared__ float stage[kThreads];
  stage[threadIdx.x] = in[threadIdx.x];
  if constexpr (Barrier) __syncthreads();
  out[threadIdx.x] = stage[(threadIdx.x + 1) % kThreads];
}

// Half the block goes to a barrier that the other half never sees.
__global__ void divergent_kernel(float* out) {
  if (threadIdx.x < kThreads / 2) __syncthreads();
  out[threadIdx.x] = 1.0f;
}

__global__ void partial_warp_kernel(float* out) {
  float x = out[threadIdx.x];
  if (threadIdx.x % 2 == 0) x = __shfl_xor_sync(kAllLanes, x, 2);
  out[threadIdx.x] = x;
}

// Writes `extra` elements past n.
__global__ void overrun_kernel(float* out, int64_t n, int64_t extra) {
  for (int64_t i = threadIdx.x; i < n + extra; i += kThreads) out[i] = 1.0f;
}

__global__ void shared_overrun_kernel(float* out, int64_t extra) {
  __shared__ float stage[kThreads];
  stage[threadIdx.x + (threadIdx.x == kThreads - 1 ? extra : 0)] = 1.0f;
  __syncthreads();
  out[threadIdx.x] = stage[threadIdx.x];
}

// The butterfly without its last step.
__global__ void short_sum_kernel(const float* in, float* out) {
  float x = in[threadIdx.x];
  for (int offset = kWarp / 2; offset > 1; offset /= 2) x += __shfl_xor_sync(kAllLanes, x, offset);
  if (threadIdx.x % kWarp == 0) out[threadIdx.x / kWarp] = x;
}

__global__ void sum_kernel(const float* in, float* out) {
  const float x = warp_sum(in[threadIdx.x]);
  if (threadIdx.x % kWarp == 0) out[threadIdx.x / kWarp] = x;
}

}  // namespace

EMULATED(rotate) {
  emulate::launch(dim3(1), kThreads, [&] { rotate_kernel<true>(a.array<float>(0), a.array<float>(1)); });
}
EMULATED(rotate_without_barrier) {
  emulate::launch(dim3(1), kThreads, [&] { rotate_kernel<false>(a.array<float>(0), a.array<float>(1)); });
}
EMULATED(divergent) {
  emulate::launch(dim3(1), kThreads, [&] { divergent_kernel(a.array<float>(0)); });
}
EMULATED(partial_warp) {
  emulate::launch(dim3(1), kThreads, [&] { partial_warp_kernel(a.array<float>(0)); });
}
EMULATED(overrun) {
  emulate::launch(dim3(1), kThreads, [&] { overrun_kernel(a.array<float>(0), a.integer(1), a.integer(2)); });
}
EMULATED(shared_overrun) {
  emulate::launch(dim3(1), kThreads, [&] { shared_overrun_kernel(a.array<float>(0), a.integer(1)); });
}
EMULATED(warp_sums) {
  emulate::launch(dim3(1), kThreads, [&] { sum_kernel(a.array<float>(0), a.array<float>(1)); });
}
EMULATED(short_warp_sums) {
  emulate::launch(dim3(1), kThreads, [&] { short_sum_kernel(a.array<float>(0), a.array<float>(1)); });
}

}  // namespace pyruntime::cuda
