// Products of int8 rows and int8 panels, as kernels.h says: a vector holds four neighbours in depth of every column,
// and a row's four meet it in every lane. Sums of a group are whole numbers and exact, and what is added up of them in
// float32 goes in the order of depth: a row's result does not depend on the rows beside it, nor on the instruction set
// but for the rounding of the last steps.
#pragma once

#include "ahead.h"

namespace pyruntime::PYRUNTIME_ISA {
namespace {

constexpr int64_t kWords = kInt8Group / 4;  // of a group

#if defined(__AVX512F__)
constexpr int kMostPanels = 3, kMostSums = 12;
#else
constexpr int kMostPanels = 1, kMostSums = 2;
#endif

// Sixteen running sums of one group.
#if defined(__AVX512VNNI__)
using Sums = IntVec;
PYRUNTIME_INLINE void add(Sums& sums, WordVec w, uint32_t x) {
  sums = reinterpret_cast<Sums>(_mm512_dpbusd_epi32(
      reinterpret_cast<__m512i>(sums), _mm512_set1_epi32(static_cast<int32_t>(x)), reinterpret_cast<__m512i>(w)));
}
#else
// In float32, where whole numbers up to 2^24 are exact; a group's stay below 2^23.
using Sums = Vec;
PYRUNTIME_INLINE void add(Sums& sums, WordVec w, uint32_t x) {
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const IntVec bytes = reinterpret_cast<IntVec>(w << (24 - 8 * j)) >> 24;
    sums += __builtin_convertvector(bytes, Vec) * static_cast<float>(static_cast<uint8_t>(x >> (8 * j)));
  }
}
#endif
PYRUNTIME_INLINE Vec to_floats(IntVec sums) { return __builtin_convertvector(sums, Vec); }
PYRUNTIME_INLINE Vec to_floats(Vec sums) { return sums; }

inline int64_t panel_bytes(const Int8Args& a) { return (a.words + a.groups) * 64; }

// Bytes of panels that are read ahead for few rows: what they and a part of the rows leave of the nearest cache.
constexpr int64_t kNear = 16384;

// What is read ahead at every word of panels that several tiles of rows are multiplied with.
struct Next {
  Ahead first, second;

  inline __attribute__((always_inline)) void step() { first.step(), second.step(); }
};

// The products of R rows from `row` on and the panels `w`, to out[r * P + p]. Near: panels are read one after
// the other, by all rows at once, so that what follows is read ahead; else `next` says what will be wanted.
template <int R, int P, bool Near>
__attribute__((noinline)) void multiply(const Int8Args& a, int64_t row, const uint8_t* const* w, Next& next, Vec* out) {
  Next ahead = next;
  Vec totals[R * P] = {};
  for (int64_t group = 0; group < a.groups; ++group) {
    const int64_t count = a.words - group * kWords < kWords ? a.words - group * kWords : kWords;
    const int64_t at = group * (kWords + 1) * 64;
    Sums sums[R * P] = {};
    const uint8_t* x = a.q + row * a.q_row + group * kInt8Group;
    for (int64_t word = 0; word < count; ++word) {
      WordVec columns[P];
      if constexpr (!Near) ahead.step();
#pragma GCC unroll 3
      for (int p = 0; p < P; ++p) {
        columns[p] = load_as<WordVec>(w[p] + at + word * 64);
        if constexpr (Near) __builtin_prefetch(w[p] + at + word * 64 + kNear);
      }
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        uint32_t bits;
        memcpy(&bits, x + r * a.q_row + word * 4, 4);
#pragma GCC unroll 3
        for (int p = 0; p < P; ++p) add(sums[r * P + p], columns[p], bits);
      }
    }
#pragma GCC unroll 3
    for (int p = 0; p < P; ++p) {
      const uint8_t* last = w[p] + at + count * 64;
      const WordVec both = load_as<WordVec>(last);
      const Vec scales = reinterpret_cast<Vec>(both & 0xffff0000u);
      const Vec column_sums = to_floats(reinterpret_cast<IntVec>(both << 16) >> 16);
      if constexpr (Near) __builtin_prefetch(last + kNear);
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        const int64_t own = (row + r) * a.groups + group;
        // Whole numbers below 2^24, exact too.
        const Vec whole = to_floats(sums[r * P + p]) - column_sums * a.zeros[own];
        totals[r * P + p] += whole * (scales * a.row_scales[own]);
      }
    }
  }
  next = ahead;
  memcpy(out, totals, sizeof(totals));
}

}  // namespace
}  // namespace pyruntime::PYRUNTIME_ISA
