// Ragged answers of unknown length: counts to starts, and what stands after the last entry.
#pragma once

#include "primitives.cuh"

namespace pyruntime::cuda {

constexpr int kScanThreads = 256;

// The rows [begin, end) of a sequence, cut to what exists.
__device__ __forceinline__ void bounds_of(const int32_t* starts, int64_t sequence, int64_t rows, int64_t& begin,
                                          int64_t& end) {
  begin = starts[sequence] < 0 ? 0 : starts[sequence];
  end = starts[sequence + 1] > rows ? rows : starts[sequence + 1];
}

// One block: counts [count] to starts [count + 1], the sums before each entry. counts may be starts + 1.
static __global__ void __launch_bounds__(kScanThreads)
    scan_kernel(const int32_t* counts, int64_t count, int32_t* starts) {
  __shared__ int32_t scratch[kScanThreads / kWarp];
  int32_t before = 0;
  for (int64_t base = 0; base < count; base += kScanThreads) {
    const int64_t i = base + threadIdx.x;
    const int32_t own = i < count ? counts[i] : 0;
    int32_t total = 0;
    const int32_t within = block_scan(own, scratch, total);
    // The barriers of block_scan lie between these writes and the reads above.
    if (i < count) starts[i + 1] = before + within + own;
    before += total;
  }
  if (threadIdx.x == 0) starts[0] = 0;
}

// Fills out[starts[last], count) with `value`.
template <class T>
__global__ void __launch_bounds__(kScanThreads)
    fill_rest_kernel(const int32_t* __restrict__ starts, int64_t last, int64_t count, T value, T* __restrict__ out) {
  const int64_t step = int64_t{gridDim.x} * kScanThreads;
  for (int64_t i = starts[last] + int64_t{blockIdx.x} * kScanThreads + threadIdx.x; i < count; i += step)
    out[i] = value;
}

}  // namespace pyruntime::cuda
