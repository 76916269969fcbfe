// Searches of one block over the ids [0, count) of a row, without a sort: the key at which a running total by ascending
// key reaches a target (a radix search), and the id at which one by ascending id does. Totals are exact 64-bit sums.
#pragma once

#include "primitives.cuh"

namespace pyruntime::cuda {

constexpr int kSelectThreads = 1024;
constexpr int kSelectWarps = kSelectThreads / kWarp;
constexpr int kBins = 128;

struct SelectShared {
  // One column a lane: lanes of a warp never meet in a bin.
  unsigned long long bins[kBins * kWarp];
  unsigned long long totals[kBins];
  unsigned long long sums[kSelectWarps];
  float floats[kSelectWarps];
  unsigned long long before;
  int64_t id;
  uint32_t bin;
  unsigned listed;
};

using Total = unsigned long long;

// The smallest key such that the amounts of all ids up to and with it reach `target` >= 1, which the whole does;
// `before`: the amounts of smaller keys. key(id) is a uint32_t, amount(id) a Total.
template <class Key, class Amount>
__device__ uint32_t find_key(int64_t count, Total target, const Key& key, const Amount& amount, SelectShared& s,
                             Total& before) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
  uint32_t prefix = 0;
  before = 0;
  for (int level = 0, shift = 32; level < 5; ++level) {  // 7 + 7 + 6 + 6 + 6 bits
    const int bits = level < 2 ? 7 : 6, above = shift;
    shift -= bits;
    for (int i = thread; i < kBins * kWarp; i += kSelectThreads) s.bins[i] = 0;
    __syncthreads();
    for (int64_t id = thread; id < count; id += kSelectThreads) {
      const uint32_t own = key(id);
      if (level > 0 && own >> above != prefix) continue;
      const Total gain = amount(id);
      if (gain != 0) atomicAdd(&s.bins[(own >> shift & ((1u << bits) - 1)) * kWarp + lane], gain);
    }
    __syncthreads();
    for (int bin = warp; bin < kBins; bin += kSelectWarps) {
      const Total sum = warp_sum(s.bins[bin * kWarp + lane]);
      if (lane == 0) s.totals[bin] = sum;
    }
    __syncthreads();
    const Total own = thread < kBins ? s.totals[thread] : 0;
    Total all = 0;
    const Total start = before + block_scan(own, s.sums, all);
    if (start < target && target <= start + own) {
      s.bin = static_cast<uint32_t>(thread);
      s.before = start;
    }
    __syncthreads();
    prefix = prefix << bits | s.bin;
    before = s.before;
  }
  return prefix;
}

// The first id at which the running total of amount(id) exceeds `target`, which the whole does.
template <class Amount>
__device__ int64_t find_id(int64_t count, Total target, const Amount& amount, SelectShared& s) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
  int64_t begin = 0, end = count;
  while (end - begin > kSelectThreads) {
    const int64_t piece = (end - begin + kSelectWarps - 1) / kSelectWarps;
    const int64_t first = begin + warp * piece, last = first + piece < end ? first + piece : end;
    Total own = 0;
    for (int64_t id = first + lane; id < last; id += kWarp) own += amount(id);
    own = warp_sum(own);
    if (lane == 0) s.sums[warp] = own;
    __syncthreads();
    int chosen = 0;
    while (chosen < kSelectWarps - 1 && s.sums[chosen] <= target) target -= s.sums[chosen++];
    begin += chosen * piece;
    end = begin + piece < end ? begin + piece : end;
    __syncthreads();
  }
  const int64_t id = begin + thread;
  const Total own = id < end ? amount(id) : 0;
  Total all = 0;
  const Total start = block_scan(own, s.sums, all);
  if (start <= target && target < start + own) s.id = id;
  __syncthreads();
  // Whatever writes s.id again has barriers of its own before it.
  return s.id;
}

// The sum of amount(id) over the row, in every thread.
template <class Amount>
__device__ Total total_of(int64_t count, const Amount& amount, SelectShared& s) {
  Total own = 0;
  for (int64_t id = threadIdx.x; id < count; id += kSelectThreads) own += amount(id);
  return block_sum(own, s.sums);
}

}  // namespace pyruntime::cuda
