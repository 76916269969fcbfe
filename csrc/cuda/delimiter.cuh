// The rows that end the items of packed multi-item sequences q⟂i₁⟂…iₙ⟂: those before each delimiter but the first.
#pragma once

#include "scan.cuh"

namespace pyruntime::cuda {

// Grid: one block a sequence. counts[sequence]: delimiters after the first.
static __global__ void __launch_bounds__(kScanThreads)
    count_delimiters_kernel(const int64_t* __restrict__ input_ids, int64_t rows, const int32_t* __restrict__ starts,
                            int64_t delimiter, int32_t* __restrict__ counts) {
  __shared__ int32_t scratch[kScanThreads / kWarp];
  int64_t begin, end;
  bounds_of(starts, blockIdx.x, rows, begin, end);
  int32_t own = 0;
  for (int64_t i = begin + threadIdx.x; i < end; i += kScanThreads) own += input_ids[i] == delimiter ? 1 : 0;
  const int32_t total = block_sum(own, scratch);
  if (threadIdx.x == 0) counts[blockIdx.x] = total > 0 ? total - 1 : 0;
}

// Grid: one block a sequence. out: the packed rows, those of sequence s from out_starts[s] on.
static __global__ void __launch_bounds__(kScanThreads)
    delimiter_rows_kernel(const int64_t* __restrict__ input_ids, int64_t rows, const int32_t* __restrict__ starts,
                          int64_t delimiter, const int32_t* __restrict__ out_starts, int64_t* __restrict__ out) {
  __shared__ int32_t scratch[kScanThreads / kWarp];
  int64_t begin, end;
  bounds_of(starts, blockIdx.x, rows, begin, end);
  const int64_t target = out_starts[blockIdx.x];
  int64_t seen = 0;
  for (int64_t base = begin; base < end; base += kScanThreads) {
    const int64_t i = base + threadIdx.x;
    const int32_t own = i < end && input_ids[i] == delimiter ? 1 : 0;
    int32_t total = 0;
    const int64_t order = seen + block_scan(own, scratch, total);
    // Starts that overlap could ask for more places than there are.
    if (own != 0 && order > 0 && target + order - 1 < rows) out[target + order - 1] = i - 1;
    seen += total;
  }
}

}  // namespace pyruntime::cuda
