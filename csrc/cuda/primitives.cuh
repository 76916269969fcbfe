// The warp and block primitives that the kernels are built on. No torch headers in any .cuh file: tests/emulation
// compiles the same text with g++. Every thread of a block calls the block_ functions, every lane of a warp the warp_
// functions; blockDim.x is a multiple of kWarp. Reductions have one fixed order, so results do not vary between runs.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "../shared/portable.h"

namespace pyruntime::cuda {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }

__device__ __forceinline__ float not_a_number() { return shared::float_of(0x7fc00000u); }
__device__ __forceinline__ float infinity() { return shared::float_of(0x7f800000u); }

// Sixteen bytes of T.
template <class T>
struct alignas(16) Vector {
  static constexpr int kCount = 16 / sizeof(T);
  T values[kCount];
};

template <class T>
constexpr int kVector = Vector<T>::kCount;

__device__ __forceinline__ bool is_aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

// Whether rows of T, `stride` elements apart from `p` on, all begin on 16 bytes.
template <class T>
__device__ __forceinline__ bool rows_aligned(const T* p, int64_t stride) {
  return is_aligned(p) && stride % kVector<T> == 0;
}

// The first `count` of kVector<T> elements at p, as float; zeros after. `aligned`: p lies on 16 bytes.
template <class T>
__device__ __forceinline__ void load_vector(const T* p, int64_t count, bool aligned, float* to) {
  if (aligned && count >= kVector<T>) {
    const Vector<T> v = *reinterpret_cast<const Vector<T>*>(p);
#pragma unroll
    for (int i = 0; i < kVector<T>; ++i) to[i] = widen(v.values[i]);
    return;
  }
#pragma unroll
  for (int i = 0; i < kVector<T>; ++i) to[i] = i < count ? widen(p[i]) : 0.0f;
}

template <class T>
__device__ __forceinline__ T warp_sum(T x) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(kAllLanes, x, offset);
  return x;
}

// NaN is carried through.
__device__ __forceinline__ float larger(float a, float b) { return a > b || a != a ? a : b; }

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) x = larger(x, __shfl_xor_sync(kAllLanes, x, offset));
  return x;
}

// Sum of the lanes up to and with this one.
template <class T>
__device__ __forceinline__ T warp_scan(T x) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
  for (int offset = 1; offset < kWarp; offset *= 2) {
    const T before = __shfl_up_sync(kAllLanes, x, offset);
    if (lane >= offset) x += before;
  }
  return x;
}

// The sum of x over the block, in every thread. `scratch`: shared, one T a warp.
template <class T>
__device__ __forceinline__ T block_sum(T x, T* scratch) {
  const int warps = static_cast<int>(blockDim.x) / kWarp;
  x = warp_sum(x);
  if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = x;
  __syncthreads();
  T total = 0;
  for (int i = 0; i < warps; ++i) total += scratch[i];
  __syncthreads();
  return total;
}

// The largest x of the block, in every thread; NaN if any is.
__device__ __forceinline__ float block_max(float x, float* scratch) {
  const int warps = static_cast<int>(blockDim.x) / kWarp;
  x = warp_max(x);
  if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = x;
  __syncthreads();
  float top = scratch[0];
  for (int i = 1; i < warps; ++i) top = larger(top, scratch[i]);
  __syncthreads();
  return top;
}

// Sum over the threads before this one; `total` becomes the sum of all. `scratch`: shared, one T a warp.
template <class T>
__device__ __forceinline__ T block_scan(T x, T* scratch, T& total) {
  const int warps = static_cast<int>(blockDim.x) / kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  const T within = warp_scan(x);
  if (threadIdx.x % kWarp == kWarp - 1) scratch[warp] = within;
  __syncthreads();
  T before = 0, sum = 0;
  for (int i = 0; i < warps; ++i) {
    if (i == warp) before = sum;
    sum += scratch[i];
  }
  __syncthreads();
  total = sum;
  return before + within - x;
}

}  // namespace pyruntime::cuda
