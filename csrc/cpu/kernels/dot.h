// Sixteen dot products at a time: R rows against C rows, R * C = 16. The one inner loop behind the linear, the scores
// and the attention's q·k. Each product sums in the same order whatever R is, so a row's result does not depend on the
// rows beside it.
#pragma once

#include "ahead.h"

namespace pyruntime::PYRUNTIME_ISA {

// Accumulators that the registers of this instruction set hold without spilling.
#if defined(__AVX512F__)
constexpr int kSubRows = 4, kSubColumns = 16;
#else
constexpr int kSubRows = 2, kSubColumns = 2;
#endif
constexpr int smaller(int a, int b) { return a < b ? a : b; }

template <class T, int SR, int SC, class Reader>
PYRUNTIME_INLINE void accumulate(const typename T::Element* const* x, const typename T::Element* const* w,
                                 int64_t depth, Vec (&sums)[SR * SC], Reader& ahead) {
  using Chunk = typename T::Chunk;
  constexpr int64_t kSize = sizeof(typename T::Element);
#pragma GCC unroll 16
  for (int i = 0; i < SR * SC; ++i) sums[i] = Vec{};
  int64_t d = 0;
  for (; d + T::kStep <= depth; d += T::kStep) {
    Chunk rows[SR];
    ahead.step();
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
template <class T, int R, int C, class Reader = NoAhead>
PYRUNTIME_INLINE Vec dots(const typename T::Element* const* x, const typename T::Element* const* w, int64_t depth,
                          Reader&& ahead = NoAhead{}) {
  static_assert(R * C == 16);
  constexpr int SR = smaller(R, kSubRows);
  constexpr int SC = smaller(C, SR == 1 ? 2 * kSubColumns : kSubColumns);
  Vec all[16];
  for (int r = 0; r < R; r += SR) {
    for (int c = 0; c < C; c += SC) {
      Vec sums[SR * SC];
      accumulate<T, SR, SC>(x + r, w + c, depth, sums, ahead);
      for (int i = 0; i < SR; ++i) {
        for (int j = 0; j < SC; ++j) all[(r + i) * C + c + j] = sums[i * SC + j];
      }
    }
  }
  return sum_lanes(all);
}

// Sixteen columns from `column` on; past `end` the last one again, whose result the caller drops.
template <class T>
PYRUNTIME_INLINE void point_at_columns(const LinearArgs& a, int64_t column, int64_t end,
                                       const typename T::Element* (&w)[16]) {
  for (int64_t c = 0; c < 16; ++c) {
    const int64_t at = column + c < end ? column + c : end - 1;
    w[c] = static_cast<const typename T::Element*>(a.w) + at * a.w_row;
  }
}

// One row against sixteen columns, column after column: memory is then read in one run, which is what a row alone waits
// for. Each product sums as in dots.
template <class T>
PYRUNTIME_INLINE Vec stream_dots(const typename T::Element* x, const typename T::Element* const* w, int64_t depth) {
  constexpr int64_t kAhead = 4096 / sizeof(typename T::Element);
  Vec all[16];
#pragma GCC unroll 1
  for (int c = 0; c < 16; ++c) {
    const auto* column = w[c];
    Vec sum{};
    int64_t d = 0;
    for (; d + T::kStep <= depth; d += T::kStep) {
      __builtin_prefetch(column + d + kAhead);
      sum = multiply_add(load_as<typename T::Chunk>(x + d), load_as<typename T::Chunk>(column + d), sum, T{});
    }
    if (d < depth) {
      constexpr int64_t kSize = sizeof(typename T::Element);
      const auto left = load_first<typename T::Chunk>(x + d, depth - d, kSize);
      sum = multiply_add(left, load_first<typename T::Chunk>(column + d, depth - d, kSize), sum, T{});
    }
    all[c] = sum;
  }
  return sum_lanes(all);
}

// Products of rows [row, row + R) and sixteen columns, into out[r * 16 + c].
template <class T, int R, class Reader = NoAhead>
PYRUNTIME_INLINE void row_products(const LinearArgs& a, int64_t row, const typename T::Element* const* w, float* out,
                                   Reader&& ahead = NoAhead{}) {
  constexpr int C = 16 / R;
  const typename T::Element* x[R];
  for (int r = 0; r < R; ++r) x[r] = static_cast<const typename T::Element*>(a.x) + (row + r) * a.x_row;
  if constexpr (R == 1) {
    const Vec products = stream_dots<T>(x[0], w, a.depth);
    memcpy(out, &products, sizeof(products));
    return;
  }
  for (int c = 0; c < 16; c += C) {
    Vec products = dots<T, R, C>(x, w + c, a.depth, ahead);
    for (int r = 0; r < R; ++r) memcpy(out + r * 16 + c, reinterpret_cast<const float*>(&products) + r * C, C * 4);
  }
}

}  // namespace pyruntime::PYRUNTIME_ISA
