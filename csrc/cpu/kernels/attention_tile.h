// A tile of attention: its buffers, loading of keys, scores q·k and the sum of weighted values.
#pragma once

#include "attention_state.h"
#include "dot.h"

namespace pyruntime::PYRUNTIME_ISA {
namespace {

template <class T>
void widen_row(const void* source, float* target, int64_t width, int64_t padded_width) {
  auto p = static_cast<const typename T::Element*>(source);
  using Half = std::conditional_t<sizeof(typename T::Element) == 4, Vec, HalfWords>;
  int64_t d = 0;
  for (; d + kLanes <= width; d += kLanes) {
    Vec v = widen(load_as<Half>(p + d), T{});
    memcpy(target + d, &v, sizeof(v));
  }
  if (d < padded_width) {
    Vec v = widen(load_first<Half>(p + d, width - d, sizeof(*p)), T{});
    memcpy(target + d, &v, sizeof(v));
  }
}

// One tile's buffers, all float32, rows padded to whole vectors.
struct Buffers {
  float* q;       // [kTileRows, D]
  float* k;       // [kKeys, D]
  float* v;       // [kKeys, Dv]
  float* scores;  // [kTileRows, kKeys]
  State part;     // of the split at hand
  State total;    // of the splits before

  // The same, its scores counted from `key` of the block on.
  Buffers from_key(int64_t key) const {
    Buffers b = *this;
    b.scores += key;
    return b;
  }
};

Buffers carve(const AttentionArgs& a, float* scratch) {
  int64_t d = padded(a.key_width), dv = padded(a.value_width);
  Buffers b;
  b.q = scratch;
  b.k = b.q + kTileRows * d;
  b.v = b.k + kKeys * d;
  b.scores = b.v + kKeys * dv;
  b.part = carve_state(a, b.scores + kTileRows * kKeys);
  b.total = carve_state(a, b.scores + kTileRows * kKeys + state_size(a));
  return b;
}

// Where the keys and values of one block lie. Keys are taken sixteen at a time: what pads the last group repeats its
// last key, and is masked.
template <class T>
struct Rows {
  const typename T::Element* k[kKeys];
  const typename T::Element* v[kKeys];
  int64_t count = 0;  // without what pads them

  // Keys [begin, end) of a tile's sequence.
  void find(const AttentionArgs& a, const AttentionTile& t, int64_t begin, int64_t end) {
    using Element = typename T::Element;
    const bool paged = a.block_tables != nullptr;
    const int32_t* page = paged ? a.block_tables + t.sequence * a.table_stride + begin / a.block_size : nullptr;
    int64_t row = paged ? begin % a.block_size : a.query_starts[t.sequence] + begin;
    count = end - begin;
    for (int64_t i = 0; i < count; ++i, ++row) {
      if (paged && row == a.block_size) row = 0, ++page;
      const int64_t block = paged ? *page : 0;
      k[i] = static_cast<const Element*>(a.k) + block * a.k_block + row * a.k_row + t.kv_head * a.k_head;
      v[i] = static_cast<const Element*>(a.v) + block * a.v_block + row * a.v_row + t.kv_head * a.v_head;
    }
    for (int64_t i = count; i < padded(count); ++i) k[i] = k[count - 1], v[i] = v[count - 1];
  }

  // The first that any row of a tile sees; none where it sees none.
  void find_first(const AttentionArgs& a, const AttentionTile& t) {
    const Span s(a, t);
    if (s.first < s.last) find(a, t, s.first, smallest(s.first + kKeys, s.last));
  }
};

// Rows that are wanted next. Pages lie anywhere, so the processor does not see them coming; they are read in small
// parts beside the work at hand, for it takes no more than some at a time.
template <class T>
struct Coming {
  const typename T::Element* const* rows = nullptr;
  int64_t count = 0;
  int64_t width = 0;

  // Columns [begin, end) of one of them.
  PYRUNTIME_INLINE void fetch(const Coming& c, int64_t row, int64_t begin, int64_t end) {
    constexpr int64_t kLine = 64 / sizeof(typename T::Element);
    if (row >= c.count) return;
    for (int64_t d = begin; d < end && d < c.width; d += kLine) __builtin_prefetch(c.rows[row] + d, 0, 2);
  }
};

// Scores are taken from the keys as they lie where the processor multiplies that dtype as it is.
template <class T>
constexpr bool kMultiplies = std::is_same_v<T, Float32>;
#if defined(__AVX512BF16__)
template <>
constexpr bool kMultiplies<BFloat16> = true;
#endif

// So few rows do not pay for float32 copies of the values; the same values and sums either way.
bool reads_values_in_place(const AttentionArgs& a, int64_t rows) { return rows <= 8 && a.value_width % kLanes == 0; }

// Narrow heads of a bidirectional model: the lanes are keys, so nothing is left to sum across lanes. It pays only where
// many rows share a key block, hence not for causal attention, which must answer a decode step bit for bit as a prompt.
bool keys_in_lanes(const AttentionArgs& a) { return !a.causal && a.key_width <= 64; }

// b.k [keys, D] to [D, kKeys]; in place, for at most 64 keys and 64 columns fit b.k.
void transpose_keys(const Buffers& b, int64_t keys, int64_t d) {
  alignas(64) float turned[64 * kKeys];
  for (int64_t key = 0; key < keys; key += kLanes) {
    for (int64_t column = 0; column < d; column += kLanes) {
      Vec tile[16];
      for (int64_t i = 0; i < kLanes; ++i) tile[i] = load_as<Vec>(b.k + (key + i) * d + column);
      transpose(tile);
      for (int64_t i = 0; i < kLanes; ++i) memcpy(turned + (column + i) * kKeys + key, &tile[i], sizeof(Vec));
    }
  }
  memcpy(b.k, turned, static_cast<size_t>(d * kKeys) * sizeof(float));
}

// What the lanes hold of a key, and a query's part that meets it there: a float32, or two bfloat16 in a word.
struct LaneFloats {
  static constexpr int64_t kPer = 1;
  PYRUNTIME_INLINE Vec add(const float* q, Vec k, Vec sum) { return splat(*q) * k + sum; }
};
#if defined(__AVX512BF16__)
struct LanePairs {
  static constexpr int64_t kPer = 2;
  PYRUNTIME_INLINE Vec add(const float* q, Vec k, Vec sum) {
    const WordVec pair = WordVec{} + load_as<uint32_t>(q);
    return reinterpret_cast<Vec>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sum), reinterpret_cast<__m512bh>(pair),
                                                  reinterpret_cast<__m512bh>(k)));
  }
};
#endif

// `d`: how many parts a row of q and a key have.
template <class Lane, int R, int N>
PYRUNTIME_INLINE void lane_scores(const Buffers& b, int64_t row, int64_t key, int64_t d) {
  Vec sums[R * N] = {};
  for (int64_t i = 0; i < d; ++i) {
    Vec k[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) k[n] = load_as<Vec>(b.k + i * kKeys + key + n * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sums[r * N + n] = Lane::add(b.q + (row + r) * d + i, k[n], sums[r * N + n]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int n = 0; n < N; ++n) memcpy(b.scores + (row + r) * kKeys + key + n * kLanes, &sums[r * N + n], sizeof(Vec));
  }
}

template <class Lane, int R>
void score_lanes(const Buffers& b, int64_t row, int64_t keys, int64_t d) {
#if defined(__AVX512F__)
  constexpr int N = 2;
#else
  constexpr int N = 1;
#endif
  int64_t key = 0;
  for (; key + N * kLanes <= keys; key += N * kLanes) lane_scores<Lane, R, N>(b, row, key, d);
  for (; key < keys; key += kLanes) lane_scores<Lane, R, 1>(b, row, key, d);
}

// `queries` and `keys`: one pointer a row of this tile, one a key of this block. `coming`: read beside.
template <class T, int R, class U>
void score_rows(const Buffers& b, int64_t row, const typename T::Element* const* queries,
                const typename T::Element* const* k, int64_t keys, int64_t d, const Coming<U>& coming) {
  constexpr int C = 16 / R;
  for (int64_t key = 0; key < keys; key += C) {
    for (int64_t i = 0; i < C; ++i) Coming<U>::fetch(coming, key + i, 0, coming.width);
    Vec dots16 = dots<T, R, C>(queries + row, k + key, d);
    for (int r = 0; r < R; ++r) {
      memcpy(b.scores + (row + r) * kKeys + key, reinterpret_cast<const float*>(&dots16) + r * C, C * sizeof(float));
    }
  }
}

// Values of a block in float32, whole vectors at a time.
struct WideValues {
  const float* v;
  int64_t dv;
  Vec at(int64_t key, int64_t column) const { return load_as<Vec>(v + key * dv + column); }
  WideValues from_key(int64_t key) const { return {v + key * dv, dv}; }
  void fetch_beside(int64_t, int64_t, int64_t) const {}
};
template <class T>
struct PlainValues {
  const typename T::Element* const* v;
  Coming<T> coming;  // a row of it for every key
  Vec at(int64_t key, int64_t column) const {
    using Part = std::conditional_t<sizeof(typename T::Element) == 4, Vec, HalfWords>;
    return widen(load_as<Part>(v[key] + column), T{});
  }
  PlainValues from_key(int64_t key) const { return {v + key, {coming.rows + key, coming.count - key, coming.width}}; }
  void fetch_beside(int64_t key, int64_t begin, int64_t end) const { Coming<T>::fetch(coming, key, begin, end); }
};

// values.at(key, ·) are finite for the keys [begin, end).
template <class Values>
bool all_finite(const Values& values, int64_t begin, int64_t end, int64_t dv) {
  Vec probes[4] = {};
  for (int64_t key = begin; key < end; ++key) {
    int64_t column = 0;
    for (; column + 4 * kLanes <= dv; column += 4 * kLanes) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) probes[i] += values.at(key, column + i * kLanes) * 0.0f;
    }
    for (; column < dv; column += kLanes) probes[0] += values.at(key, column) * 0.0f;
  }
  return sum_of((probes[0] + probes[1]) + (probes[2] + probes[3])) == 0.0f;
}

// out[row + r, :] = correction[r] * out[row + r, :] + sum over keys of scores[row + r, key] * v[key, :]
template <int R, int N, class Values>
PYRUNTIME_INLINE void add_values(const Buffers& b, const Values& values, int64_t row, int64_t keys, int64_t dv,
                                 int64_t column, const float* correction) {
  Vec sums[R * N];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      sums[r * N + n] = load_as<Vec>(b.part.out + (row + r) * dv + column + n * kLanes) * correction[r];
    }
  }
  for (int64_t key = 0; key < keys; ++key) {
    values.fetch_beside(key, column, column + N * kLanes);
    Vec weight[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) weight[r] = splat(b.scores[(row + r) * kKeys + key]);
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      const Vec value = values.at(key, column + n * kLanes);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) sums[r * N + n] = weight[r] * value + sums[r * N + n];
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n)
      memcpy(b.part.out + (row + r) * dv + column + n * kLanes, &sums[r * N + n], sizeof(Vec));
  }
}

template <int R, class Values>
void value_rows(const Buffers& b, const Values& values, int64_t row, int64_t keys, int64_t dv,
                const float* correction) {
#if defined(__AVX512F__)
  constexpr int N = 4;
#else
  constexpr int N = R == 1 ? 4 : (R == 2 ? 2 : 1);
#endif
  int64_t column = 0;
  for (; column + N * kLanes <= dv; column += N * kLanes)
    add_values<R, N>(b, values, row, keys, dv, column, correction);
  for (; column + 2 * kLanes <= dv; column += 2 * kLanes)
    add_values<R, 2>(b, values, row, keys, dv, column, correction);
  for (; column < dv; column += kLanes) add_values<R, 1>(b, values, row, keys, dv, column, correction);
}

}  // namespace
}  // namespace pyruntime::PYRUNTIME_ISA
