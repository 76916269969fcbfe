// Attention over packed or paged keys: blocked over keys with an online softmax, float32 sums, no [L, L] matrix.
//
// A tile is up to kTileRows rows (query position × query head of one key head). Key blocks start at multiples of kKeys
// of the key's position in its sequence, so a row's sums have the same order in any tile, any chunk of a prompt, any
// page size. Keys are summed in splits of kSplit, again by position, each on its own, and the splits joined in order: a
// single row of many keys can so be shared among threads and still answers the same bits.
#include "attention_pairs.h"
#include "attention_softmax.h"
#include "attention_state.h"
#include "attention_tile.h"

namespace pyruntime::PYRUNTIME_ISA {
namespace {

// Keys in lanes as words of two bfloat16, whole vectors of them.
template <class T>
bool multiplies_pairs([[maybe_unused]] const AttentionArgs& a) {
#if defined(__AVX512BF16__)
  if constexpr (std::is_same_v<T, BFloat16>) return keys_in_lanes(a) && a.key_width % 32 == 0;
#endif
  return false;
}

// Rows of scores from keys that lie in b.k as [parts, kKeys].
template <class Lane>
void score_all_lanes(const Buffers& b, int64_t rows, int64_t keys, int64_t parts) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) score_lanes<Lane, 4>(b, r, keys, parts);
  for (; r < rows; ++r) score_lanes<Lane, 1>(b, r, keys, parts);
}

// Float32 copies, for scores that are not taken from the queries as they lie.
template <class T>
void load_queries(const Span& s, const Buffers& b) {
  if (kMultiplies<T> && !keys_in_lanes(s.a)) return;
  if (multiplies_pairs<T>(s.a)) {
    for (int64_t r = 0; r < s.rows; ++r) memcpy(b.q + r * s.a.key_width / 2, s.query<T>(r), s.a.key_width * 2);
    return;
  }
  const int64_t d = padded(s.a.key_width);
  for (int64_t r = 0; r < s.rows; ++r) widen_row<T>(s.query<T>(r), b.q + r * d, s.a.key_width, d);
}

template <class T>
void widen_rows(const typename T::Element* const* rows, int64_t count, float* target, int64_t width) {
  for (int64_t i = 0; i < count; ++i) widen_row<T>(rows[i], target + i * padded(width), width, padded(width));
}

// b.scores of all rows against the keys of one block. `coming`: read beside, where there are few rows.
template <class T>
void score(const Span& s, const Rows<T>& block, int64_t keys, const typename T::Element* const* queries,
           const Buffers& b, const Coming<T>& coming) {
  const int64_t d = padded(s.a.key_width), rows = s.rows;
#if defined(__AVX512BF16__)
  if constexpr (std::is_same_v<T, BFloat16>) {
    if (multiplies_pairs<T>(s.a)) {
      turn_pairs(block.k, keys, b.k, s.a.key_width / 2);
      return score_all_lanes<LanePairs>(b, rows, keys, s.a.key_width / 2);
    }
  }
#endif
  if (keys_in_lanes(s.a)) {
    widen_rows<T>(block.k, keys, b.k, s.a.key_width);
    transpose_keys(b, keys, d);
    return score_all_lanes<LaneFloats>(b, rows, keys, d);
  }
  const auto all = [&]<class U>(U, const auto* const* q, const auto* const* k, int64_t width) {
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) score_rows<U, 4>(b, r, q, k, keys, width, coming);
    for (; r + 2 <= rows; r += 2) score_rows<U, 2>(b, r, q, k, keys, width, coming);
    for (; r < rows; ++r) score_rows<U, 1>(b, r, q, k, keys, width, coming);
  };
  if constexpr (kMultiplies<T>) {
    all(T{}, queries, block.k, s.a.key_width);
  } else {
    widen_rows<T>(block.k, keys, b.k, s.a.key_width);
    const float *q[kTileRows], *k[kKeys];
    for (int64_t r = 0; r < rows; ++r) q[r] = b.q + r * d;
    for (int64_t i = 0; i < keys; ++i) k[i] = b.k + i * d;
    all(Float32{}, q, k, d);
  }
}

template <class Values>
void add_all_values(const Buffers& b, const Values& values, int64_t rows, int64_t keys, int64_t dv,
                    const float* correction) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) value_rows<4>(b, values, r, keys, dv, correction + r);
  for (; r + 2 <= rows; r += 2) value_rows<2>(b, values, r, keys, dv, correction + r);
  for (; r < rows; ++r) value_rows<1>(b, values, r, keys, dv, correction + r);
}

// The weighted values of keys [block, end). The weight of a key that a row does not see is 0, and 0 * NaN is NaN: a
// value that no row sees is left out, and where one that only some rows see is not finite each row takes its own alone.
template <class Values>
void add_visible_values(const Span& s, const Buffers& b, const Values& values, int64_t block, int64_t end,
                        const float* correction) {
  const int64_t dv = padded(s.a.value_width), rows = s.rows;
  const auto inside = [&](int64_t key) { return largest(block, smallest(end, key)) - block; };
  const int64_t begin = inside(s.low(0)), stop = inside(s.high(rows - 1));
  const int64_t shared_begin = inside(s.low(rows - 1)), shared_stop = inside(s.high(0));
  if (shared_stop <= shared_begin
          ? all_finite(values, begin, stop, dv)
          : all_finite(values, begin, shared_begin, dv) && all_finite(values, shared_stop, stop, dv)) {
    return add_all_values(b.from_key(begin), values.from_key(begin), rows, stop - begin, dv, correction);
  }
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t first = inside(s.low(r)), last = inside(s.high(r));
    value_rows<1>(b.from_key(first), values.from_key(first), r, last - first, dv, correction + r);
  }
}

// The tile's rows against the keys of one split alone: maxima, sums and unnormalised values into b.part. `after`: what
// keys are wanted after them, by this tile or, where it is not null, by that one.
template <class T>
void attend(const Span& s, int64_t split, const Buffers& b, const AttentionTile* after) {
  const AttentionArgs& a = s.a;
  const int64_t dv = padded(a.value_width), rows = s.rows;
  for (int64_t r = 0; r < rows; ++r) b.part.maxima[r] = kNothing, b.part.sums[r] = 0.0f;
  memset(b.part.out, 0, static_cast<size_t>(rows * dv) * sizeof(float));
  const typename T::Element* queries[kTileRows];
  for (int64_t r = 0; r < rows; ++r) queries[r] = s.query<T>(r);
  const bool few = reads_values_in_place(a, rows);
  const int64_t stop = smallest(s.last, (split + 1) * kSplit);
  Rows<T> here;
  for (int64_t block = largest(s.first, split * kSplit); block < stop; block += kKeys) {
    const int64_t end = smallest(block + kKeys, s.last), width = padded(end - block);
    here.find(a, s.t, block, end);
    score<T>(s, here, width, queries, b, few ? Coming<T>{here.v, here.count, a.value_width} : Coming<T>{});
    float correction[kTileRows];
    int64_t r = 0;
    if (a.softcap == 0.0f && s.low(rows - 1) <= block && s.high(0) >= end) {
      for (; r + 4 <= rows; r += 4) {
        soften_rows<4>(a, b.scores + r * kKeys, block, end - block, b.part.maxima + r, b.part.sums + r, correction + r);
      }
    }
    for (; r < rows; ++r) {
      correction[r] = soften(a, b.scores + r * kKeys, block, width, s.low(r), smallest(s.high(r), end),
                             b.part.maxima[r], b.part.sums[r]);
    }
#if defined(__AVX512BF16__)
    if constexpr (std::is_same_v<T, BFloat16>) {
      if (multiplies_pairs<T>(a) && dv == a.value_width && s.low(rows - 1) <= block && s.high(0) >= end) {
        add_all_pairs(b, here.v, rows, end - block, width, dv, correction);
        continue;
      }
    }
#endif
    if (few) {
      Rows<T> next;
      if (end < s.last) {
        next.find(a, s.t, end, smallest(end + kKeys, s.last));
      } else if (after != nullptr) {
        next.find_first(a, *after);
      }
      add_visible_values(s, b, PlainValues<T>{here.v, {next.k, next.count, a.key_width}}, block, end, correction);
    } else {
      widen_rows<T>(here.v, end - block, b.v, a.value_width);
      add_visible_values(s, b, WideValues{b.v, dv}, block, end, correction);
    }
  }
}

template <class T>
void run(const AttentionArgs& a, const AttentionTile& t, const AttentionTile* after, float* scratch) {
  const Buffers b = carve(a, scratch);
  const Span s(a, t);
  load_queries<T>(s, b);
  // A single split is the total, unless there are sinks to add it to.
  if (a.sinks == nullptr && s.first < s.last && s.first / kSplit == (s.last - 1) / kSplit) {
    attend<T>(s, s.first / kSplit, b, after);
    return write_rows<T>(s, b.part);
  }
  begin_total(s, b.total);
  for (int64_t split = s.first / kSplit; split * kSplit < s.last; ++split) {
    attend<T>(s, split, b, after);
    add_part(s, b.part, b.total);
  }
  write_rows<T>(s, b.total);
}

template <class T>
void run_split(const AttentionArgs& a, const AttentionTile& t, int64_t split, float* scratch, float* part) {
  Buffers b = carve(a, scratch);
  b.part = carve_state(a, part);
  const Span s(a, t);
  load_queries<T>(s, b);
  attend<T>(s, split, b, nullptr);
}

template <class T>
void run_join(const AttentionArgs& a, const AttentionTile& t, const float* parts, int64_t count, float* scratch) {
  const Buffers b = carve(a, scratch);
  const Span s(a, t);
  begin_total(s, b.total);
  for (int64_t i = 0; i < count; ++i) {
    add_part(s, carve_state(a, const_cast<float*>(parts) + i * state_size(a)), b.total);
  }
  write_rows<T>(s, b.total);
}

}  // namespace

int64_t attention_tile_rows(const AttentionArgs& a) { return largest(1, kTileRows / (a.q_heads / a.kv_heads)); }

int64_t attention_scratch(const AttentionArgs& a) {
  return (kTileRows + kKeys) * padded(a.key_width) + kKeys * padded(a.value_width) + kTileRows * kKeys +
         2 * state_size(a);
}

int64_t attention_part(const AttentionArgs& a) { return state_size(a); }

KeySplits attention_splits(const AttentionArgs& a, const AttentionTile& t) {
  const Span s(a, t);
  const int64_t first = s.first / kSplit, end = (s.last + kSplit - 1) / kSplit;
  return {first, end > first ? end - first : 0};
}

#define FOR_DTYPE(call)      \
  switch (a.dtype) {         \
    case DType::kFloat32:    \
      return call(Float32);  \
    case DType::kBFloat16:   \
      return call(BFloat16); \
    case DType::kFloat16:    \
      return call(Float16);  \
  }

void attention(const AttentionArgs& a, const AttentionTile& t, const AttentionTile* after, float* scratch) {
#define CALL(T) run<T>(a, t, after, scratch)
  FOR_DTYPE(CALL)
#undef CALL
}

void attention_split(const AttentionArgs& a, const AttentionTile& t, int64_t split, float* scratch, float* part) {
#define CALL(T) run_split<T>(a, t, split, scratch, part)
  FOR_DTYPE(CALL)
#undef CALL
}

void attention_join(const AttentionArgs& a, const AttentionTile& t, const float* parts, int64_t count, float* scratch) {
#define CALL(T) run_join<T>(a, t, parts, count, scratch)
  FOR_DTYPE(CALL)
#undef CALL
}

}  // namespace pyruntime::PYRUNTIME_ISA
