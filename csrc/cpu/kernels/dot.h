// Sixteen dot products at a time: R rows against C rows, R * C = 16. The one inner loop behind the linear, the scores
// and the attention's q·k. Each product sums in the same order whatever R is, so a row's result does not depend on the
// rows beside it.
#pragma once

#include "vec.h"

namespace pyruntime::PYRUNTIME_ISA {

// Accumulators that the registers of this instruction set hold without spilling.
#if defined(__AVX512F__)
constexpr int kSubRows = 4, kSubColumns = 16;
#else
constexpr int kSubRows = 2, kSubColumns = 2;
#endif
constexpr int smaller(int a, int b) { return a < b ? a : b; }

template <class T, int SR, int SC>
PYRUNTIME_INLINE void accumulate(const typename T::Element* const* x, const typename T::Element* const* w,
                                 int64_t depth, Vec (&sums)[SR * SC]) {
  using Chunk = typename T::Chunk;
  constexpr int64_t kSize = sizeof(typename T::Element);
#pragma GCC unroll 16
  for (int i = 0; i < SR * SC; ++i) sums[i] = Vec{};
  int64_t d = 0;
  for (; d + T::kStep <= depth; d += T::kStep) {
    Chunk rows[SR];
#pragma GCC unroll 4
    for (int r = 0; r < SR; ++r) rows[r] = load_as<Chunk>(x[r] + d);
#pragma GCC unroll 16
    for (int c = 0; c < SC; ++c) {
      Chunk column = load_as<Chunk>(w[c] + d);
#pragma GCC unroll 4
      for (int r = 0; r < SR; ++r) sums[r * SC + c] = multiply_add(rows[r], column, sums[r * SC + c], T{});
    }
  }
  if (d < depth) {
#pragma GCC unroll 16
    for (int c = 0; c < SC; ++c) {
      Chunk column = load_first<Chunk>(w[c] + d, depth - d, kSize);
#pragma GCC unroll 4
      for (int r = 0; r < SR; ++r) {
        sums[r * SC + c] = multiply_add(load_first<Chunk>(x[r] + d, depth - d, kSize), column, sums[r * SC + c], T{});
      }
    }
  }
}

// Lane r * C + c of the result: sum over d < depth of x[r][d] * w[c][d].
template <class T, int R, int C>
PYRUNTIME_INLINE Vec dots(const typename T::Element* const* x, const typename T::Element* const* w, int64_t depth) {
  static_assert(R * C == 16);
  constexpr int SR = smaller(R, kSubRows);
  constexpr int SC = smaller(C, SR == 1 ? 2 * kSubColumns : kSubColumns);
  Vec all[16];
  for (int r = 0; r < R; r += SR) {
    for (int c = 0; c < C; c += SC) {
      Vec sums[SR * SC];
      accumulate<T, SR, SC>(x + r, w + c, depth, sums);
      for (int i = 0; i < SR; ++i) {
        for (int j = 0; j < SC; ++j) all[(r + i) * C + c + j] = sums[i * SC + j];
      }
    }
  }
  return sum_lanes(all);
}

}  // namespace pyruntime::PYRUNTIME_ISA
