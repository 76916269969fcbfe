// What attention asks of the shapes of its queries, keys and values, on every device.
#pragma once

#include <utility>

#include "checks.h"

namespace pyruntime {

// q [T, Hq, D]; k and v with their heads at dimension `key_heads_at`, their widths behind it.
inline void check_heads(const Tensor& q, const Tensor& k, const Tensor& v, int64_t key_heads_at) {
  check_shape(q, "q", {-1, -1, -1});
  for (const auto& [t, name] : {std::pair{&k, "k"}, std::pair{&v, "v"}}) {
    require(t->scalar_type() == q.scalar_type(), name, ": expected the dtype of q (",
            torch::headeronly::toString(q.scalar_type()), "), got ", describe(*t));
    require(t->dim() == key_heads_at + 2, name, ": expected ", key_heads_at + 2, " dimensions, got ", describe(*t));
    require(t->size(key_heads_at) == k.size(key_heads_at), name, ": expected ", k.size(key_heads_at), " heads, got ",
            describe(*t));
    check_dense_rows(*t, name);
  }
  check_dense_rows(q, "q");
  const int64_t heads = q.size(1), key_heads = k.size(key_heads_at), width = q.size(2);
  require(width >= 1 && v.size(key_heads_at + 1) >= 1, "q, v: heads must be at least one wide");
  require(k.size(key_heads_at + 1) == width, "k: expected heads ", width, " wide as q's, got ", describe(k));
  require(key_heads >= 1 && heads % key_heads == 0 && heads >= 1, "q: ", heads, " heads is not a multiple of k's ",
          key_heads);
  require(heads / key_heads <= 64, "q: at most 64 query heads a key head, got ", heads / key_heads);
}

inline void check_windows(int64_t window_left, int64_t window_right) {
  require(window_left >= -1, "window_left: must be -1 (unlimited) or more, got ", window_left);
  require(window_right >= -1, "window_right: must be -1 (unlimited) or more, got ", window_right);
}

inline void check_packed_rows(const Tensor& q, const Tensor& k, const Tensor& v) {
  const int64_t rows = q.size(0);
  require(k.size(0) == rows && v.size(0) == rows, "k, v: expected ", rows, " rows as q has, got ", describe(k), " and ",
          describe(v));
}

inline void check_same_blocks(const Tensor& k_cache, const Tensor& v_cache) {
  require(v_cache.size(0) == k_cache.size(0) && v_cache.size(1) == k_cache.size(1), "v_cache: expected the blocks of ",
          describe(k_cache), ", got ", describe(v_cache));
}

inline void check_block_size(const Tensor& k_cache) {
  require(k_cache.size(1) >= 1, "k_cache: blocks must hold at least one key, got ", describe(k_cache));
}

}  // namespace pyruntime
