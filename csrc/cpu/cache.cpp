// store_kv and copy_blocks: rows into the paged key/value cache, in place.
#include <cstring>

#include "../checks.h"
#include "dispatch.h"
#include "ops.h"

namespace pyruntime {
namespace {

struct Cache {
  char* data;
  int64_t blocks, block_size, block_bytes, row_bytes, head_bytes, heads, width_bytes;
};

Cache describe_cache(const Tensor& cache, const char* name) {
  check_floating(cache, name);
  check_shape(cache, name, {-1, -1, -1, -1});
  check_dense_rows(cache, name);
  const int64_t size = static_cast<int64_t>(cache.element_size());
  return {static_cast<char*>(cache.mutable_data_ptr()),
          cache.size(0),
          cache.size(1),
          cache.stride(0) * size,
          cache.stride(1) * size,
          cache.stride(2) * size,
          cache.size(2),
          cache.size(3) * size};
}

void check_rows(const Tensor& rows, const char* name, const Tensor& cache, const char* cache_name, int64_t count) {
  check_same_dtype(rows, name, cache, cache_name);
  check_shape(rows, name, {count, cache.size(2), cache.size(3)});
  check_dense_rows(rows, name);
}

void store(const Tensor& rows, const int64_t* slots, const Cache& c) {
  const char* source = static_cast<const char*>(rows.const_data_ptr());
  const int64_t size = static_cast<int64_t>(rows.element_size());
  const int64_t row_bytes = rows.stride(0) * size, head_bytes = rows.stride(1) * size;
  for (int64_t t = 0; t < rows.size(0); ++t) {
    char* target = c.data + slots[t] / c.block_size * c.block_bytes + slots[t] % c.block_size * c.row_bytes;
    for (int64_t h = 0; h < c.heads; ++h) {
      std::memcpy(target + h * c.head_bytes, source + t * row_bytes + h * head_bytes,
                  static_cast<size_t>(c.width_bytes));
    }
  }
}

}  // namespace

void store_kv(const Tensor k, const Tensor v, const Tensor slot_mapping, Tensor k_cache, Tensor v_cache) {
  const Cache keys = describe_cache(k_cache, "k_cache"), values = describe_cache(v_cache, "v_cache");
  require(keys.blocks == values.blocks && keys.block_size == values.block_size, "v_cache: expected the blocks of ",
          describe(k_cache), ", got ", describe(v_cache));
  check_array(slot_mapping, "slot_mapping", ScalarType::Long, {-1});
  const int64_t count = slot_mapping.size(0), slots = keys.blocks * keys.block_size;
  check_rows(k, "k", k_cache, "k_cache", count);
  check_rows(v, "v", v_cache, "v_cache", count);
  const int64_t* slot = slot_mapping.const_data_ptr<int64_t>();
  for (int64_t t = 0; t < count; ++t) {
    require(slot[t] >= 0 && slot[t] < slots, "slot_mapping: entry ", t, " is ", slot[t], ", outside the ", slots,
            " slots of the cache");
  }
  store(k, slot, keys);
  store(v, slot, values);
}

namespace {

void copy_blocks(Tensor k_cache, Tensor v_cache, const Tensor pairs) {
  const Cache caches[2] = {describe_cache(k_cache, "k_cache"), describe_cache(v_cache, "v_cache")};
  require(caches[0].blocks == caches[1].blocks && caches[0].block_size == caches[1].block_size,
          "v_cache: expected the blocks of ", describe(k_cache), ", got ", describe(v_cache));
  check_array(pairs, "pairs", ScalarType::Long, {-1, 2});
  const int64_t* pair = pairs.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < 2 * pairs.size(0); ++i) {
    require(pair[i] >= 0 && pair[i] < caches[0].blocks, "pairs: entry [", i / 2, ", ", i % 2, "] is ", pair[i],
            ", outside the ", caches[0].blocks, " blocks of the cache");
  }
  for (int64_t i = 0; i < pairs.size(0); ++i) {
    for (const Cache& c : caches) {
      for (int64_t row = 0; row < c.block_size; ++row) {
        for (int64_t h = 0; h < c.heads; ++h) {
          const int64_t at = row * c.row_bytes + h * c.head_bytes;
          std::memmove(c.data + pair[2 * i + 1] * c.block_bytes + at, c.data + pair[2 * i] * c.block_bytes + at,
                       static_cast<size_t>(c.width_bytes));
        }
      }
    }
  }
}

}  // namespace
}  // namespace pyruntime

STABLE_TORCH_LIBRARY_IMPL(pyruntime, CPU, m) {
  m.impl("store_kv", TORCH_BOX(&pyruntime::store_kv));
  m.impl("copy_blocks", TORCH_BOX(&pyruntime::copy_blocks));
}
