// Attention of a bidirectional model in bfloat16, where the processor multiplies pairs of them: scores over pairs of
// columns, values over pairs of keys. Weights are rounded to bfloat16 on the way, as the answer is.
#pragma once

#include "attention_tile.h"

#if defined(__AVX512BF16__)

namespace pyruntime::PYRUNTIME_ISA {
namespace {

// Rows of words, sixteen to a vector, to [words, kKeys].
void turn_pairs(const uint16_t* const* rows, int64_t count, float* turned, int64_t words) {
  for (int64_t key = 0; key < count; key += kLanes) {
    for (int64_t word = 0; word < words; word += kLanes) {
      Vec tile[16];
#pragma GCC unroll 16
      for (int64_t i = 0; i < kLanes; ++i) tile[i] = load_as<Vec>(rows[key + i] + 2 * word);
      transpose(tile);
#pragma GCC unroll 16
      for (int64_t i = 0; i < kLanes; ++i) memcpy(turned + (word + i) * kKeys + key, &tile[i], sizeof(Vec));
    }
  }
}

// Values of `count` keys, of which every two become a row of words; what pads the last is zero.
void join_values(const uint16_t* const* v, int64_t count, int64_t padded_count, uint32_t* words, int64_t dv) {
  for (int64_t key = 0; key < padded_count; key += 2) {
    for (int64_t c = 0; c < dv; c += kLanes) {
      WordVec pair{};
      if (key < count) pair = to_words(load_as<HalfWords>(v[key] + c));
      if (key + 1 < count) pair |= to_words(load_as<HalfWords>(v[key + 1] + c)) << 16;
      memcpy(words + key / 2 * dv + c, &pair, sizeof(pair));
    }
  }
}

// A row's weights to bfloat16, at the front of where they were.
void round_weights(float* weights, int64_t count) {
  for (int64_t key = 0; key < count; key += kLanes) {
    const HalfWords rounded = narrow(load_as<Vec>(weights + key), BFloat16{});
    memcpy(reinterpret_cast<uint16_t*>(weights) + key, &rounded, sizeof(rounded));
  }
}

template <int R, int N>
PYRUNTIME_INLINE void add_pairs(const Buffers& b, const uint32_t* values, int64_t row, int64_t keys, int64_t dv,
                                int64_t column, const float* correction) {
  Vec sums[R * N];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      sums[r * N + n] = load_as<Vec>(b.part.out + (row + r) * dv + column + n * kLanes) * correction[row + r];
    }
  }
  for (int64_t pair = 0; pair < keys / 2; ++pair) {
    WordVec value[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) value[n] = load_as<WordVec>(values + pair * dv + column + n * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const WordVec weight = WordVec{} + load_as<uint32_t>(b.scores + (row + r) * kKeys + pair);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        sums[r * N + n] = reinterpret_cast<Vec>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sums[r * N + n]),
                                                                 reinterpret_cast<__m512bh>(weight),
                                                                 reinterpret_cast<__m512bh>(value[n])));
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      memcpy(b.part.out + (row + r) * dv + column + n * kLanes, &sums[r * N + n], sizeof(Vec));
    }
  }
}

template <int R>
void pair_rows(const Buffers& b, const uint32_t* values, int64_t row, int64_t keys, int64_t dv,
               const float* correction) {
  int64_t column = 0;
  for (; column + 2 * kLanes <= dv; column += 2 * kLanes) {
    add_pairs<R, 2>(b, values, row, keys, dv, column, correction);
  }
  for (; column < dv; column += kLanes) add_pairs<R, 1>(b, values, row, keys, dv, column, correction);
}

// The weighted values of a block that every row sees whole; b.scores are used up.
void add_all_pairs(const Buffers& b, const uint16_t* const* v, int64_t rows, int64_t count, int64_t padded_count,
                   int64_t dv, const float* correction) {
  uint32_t* values = reinterpret_cast<uint32_t*>(b.v);
  join_values(v, count, padded_count, values, dv);
  for (int64_t r = 0; r < rows; ++r) round_weights(b.scores + r * kKeys, padded_count);
  int64_t r = 0;
  for (; r + 8 <= rows; r += 8) pair_rows<8>(b, values, r, padded_count, dv, correction);
  for (; r < rows; ++r) pair_rows<1>(b, values, r, padded_count, dv, correction);
}

}  // namespace
}  // namespace pyruntime::PYRUNTIME_ISA

#endif
