// Rows into the paged key/value cache, and whole blocks within it. Elements are copied as they are, in units of as many
// bytes as all places allow.
#pragma once

#include "primitives.cuh"

namespace pyruntime::cuda {

constexpr int kCopyThreads = 256;

struct alignas(16) Bytes16 {
  uint32_t words[4];
};

// One of the two caches; everything counted in units.
template <class Unit>
struct CacheArguments {
  Unit* cache;  // [blocks, block_size, heads, width], these strides from one to the next
  int64_t block_stride, row_stride, head_stride, heads, width;
  const Unit* rows;  // [tokens, heads, width] to be stored
  int64_t token_stride, rows_head_stride;
};

template <class Unit>
__device__ __forceinline__ int64_t place_in_row(const CacheArguments<Unit>& c, int64_t i) {
  return i / c.width * c.head_stride + i % c.width;
}

// What is a thread's own: a unit of the keys or of the values of a row.
template <class Unit>
struct OwnUnit {
  CacheArguments<Unit> cache;  // a copy: a pointer to either argument would put both into memory
  int64_t row, unit;
  bool is_there;
};

// Grid: the units of all keys and values of `rows` rows, one a thread.
template <class Unit>
__device__ __forceinline__ OwnUnit<Unit> own_unit(const CacheArguments<Unit>& keys, const CacheArguments<Unit>& values,
                                                  int64_t rows) {
  const int64_t of_keys = keys.heads * keys.width, each = of_keys + values.heads * values.width;
  const int64_t i = int64_t{blockIdx.x} * kCopyThreads + threadIdx.x;
  OwnUnit<Unit> own{keys, i / each, i % each, i < rows * each};
  if (own.unit >= of_keys) own.cache = values, own.unit -= of_keys;
  return own;
}

// Grid: the units of all tokens' keys and values, one a thread. A slot outside the cache is passed over: the host
// cannot see it.
template <class Unit>
__global__ void __launch_bounds__(kCopyThreads)
    store_kv_kernel(const CacheArguments<Unit> keys, const CacheArguments<Unit> values,
                    const int64_t* __restrict__ slots, int64_t tokens, int64_t blocks, int64_t block_size) {
  const auto [c, token, unit, is_there] = own_unit(keys, values, tokens);
  if (!is_there) return;
  const int64_t slot = slots[token];
  if (slot < 0 || slot >= blocks * block_size) return;
  const int64_t from = token * c.token_stride + unit / c.width * c.rows_head_stride + unit % c.width;
  c.cache[slot / block_size * c.block_stride + slot % block_size * c.row_stride + place_in_row(c, unit)] = c.rows[from];
}

// Grid: the units of one block of keys and one of values. A thread copies its own unit of every pair, in order, so that
// a pair's source may be an earlier one's target. Pairs outside the cache are passed over.
template <class Unit>
__global__ void __launch_bounds__(kCopyThreads)
    copy_blocks_kernel(const CacheArguments<Unit> keys, const CacheArguments<Unit> values,
                       const int64_t* __restrict__ pairs, int64_t count, int64_t blocks, int64_t block_size) {
  const auto [c, row, unit, is_there] = own_unit(keys, values, block_size);
  if (!is_there) return;
  Unit* own = c.cache + row * c.row_stride + place_in_row(c, unit);
  for (int64_t pair = 0; pair < count; ++pair) {
    const int64_t source = pairs[2 * pair], target = pairs[2 * pair + 1];
    if (source < 0 || source >= blocks || target < 0 || target >= blocks) continue;
    own[target * c.block_stride] = own[source * c.block_stride];
  }
}

}  // namespace pyruntime::cuda
