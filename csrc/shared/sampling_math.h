// The arithmetic that decides a draw. CPU and CUDA kernels differ in how they search, never in what they decide:
//
//   x   the logit in float32 after penalties, bias and mask (adjusted below)
//   z   (x - max x) / temperature, at most 0; rank_of(z) orders candidates, smaller is more probable, ties by lower id
//   e   decay(z) = e^z in float32; exactly 1 at the maximum
//   w   weight_of(e) = floor(e * 2^44), an integer: masses are exact sums, so their order does not matter
//
//   top_k  keeps the k candidates of smallest (rank, id)
//   top_p  keeps the shortest head of that order whose mass is >= top_p_target(top_p, mass of what top_k kept)
//   min_p  keeps candidates with e >= min_p (the maximum is always kept)
//   draw   of what is left, in id order, the first whose running mass exceeds draw_target(philox(...), mass left)
//
// With at most kMaxVocabulary candidates no sum exceeds 64 bits. Temperature 0 takes the largest x, the lowest id on
// ties. A row with NaN or +inf among its logits (raw or adjusted), or with nothing above -inf left, has no draw: id -1,
// logprob NaN, top ids -1, top logprobs NaN.
//
// Logprobs are of the raw logits l: (l - max l) - log_mass(sum over ids of weight_of(decay(l - max l))); the top ones
// are ordered by (l descending, id).
#pragma once

#include <cmath>

#include "portable.h"

namespace pyruntime::shared {

constexpr int64_t kMaxVocabulary = (int64_t{1} << 20) - 1;
constexpr int64_t kMaxTopLogprobs = 1024;
constexpr float kWeightScale = 17592186044416.0f;  // 2^44

// Logit of a token that the sequence has seen; `generated` counts it among the generated tokens alone (0: prompt only).
PYRUNTIME_HD float penalised(float x, int32_t generated, float repetition, float frequency, float presence) {
  if (generated > 0) {
    x = subtract(x, multiply(frequency, static_cast<float>(generated)));
    x = subtract(x, presence);
  }
  if (repetition == 1.0f) return x;
  return x < 0.0f ? multiply(x, repetition) : divide(x, repetition);
}

PYRUNTIME_HD bool allowed(const uint32_t* bitmask_row, int64_t id) { return (bitmask_row[id >> 5] >> (id & 31)) & 1u; }

PYRUNTIME_HD float shifted(float x, float top, float temperature) { return divide(subtract(x, top), temperature); }

// For z <= 0 (−inf too): rises as z falls.
PYRUNTIME_HD uint32_t rank_of(float z) { return bits_of(z) & 0x7fffffffu; }

// The value with that rank; decay and weight_of of it are those of every candidate of the rank.
PYRUNTIME_HD float value_of_rank(uint32_t rank) { return rank == 0 ? 0.0f : float_of(rank | 0x80000000u); }

// How decay computes, for one float; the CPU kernels hand in the same operations on vectors.
struct ScalarOps {
  using Real = float;
  PYRUNTIME_HD float splat(float x) { return x; }
  PYRUNTIME_HD float multiply(float a, float b) { return shared::multiply(a, b); }
  PYRUNTIME_HD float add(float a, float b) { return shared::add(a, b); }
  // 2^n where `biased` = 1.5 * 2^23 + n, for n in -126 to 127.
  PYRUNTIME_HD float power_of_two(float biased) { return float_of((bits_of(biased) - 0x4b400000u + 127u) << 23); }
  PYRUNTIME_HD float where_less(float a, float b, float yes, float no) { return a < b ? yes : no; }
};

// e^z for z <= 0, relative error below 2^-22; 0 below -87. Polynomial of Cephes' expf, no fused operation.
template <class Ops>
PYRUNTIME_HD typename Ops::Real decay_with(typename Ops::Real z) {
  using Real = typename Ops::Real;
  const Real floor = Ops::splat(-87.0f), round = Ops::splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Real x = Ops::where_less(z, floor, floor, z);
  const Real biased = Ops::add(Ops::multiply(x, Ops::splat(1.44269504088896341f)), round);
  const Real n = Ops::add(biased, Ops::splat(-12582912.0f));
  Real r = Ops::add(x, Ops::multiply(n, Ops::splat(-0.693359375f)));
  r = Ops::add(r, Ops::multiply(n, Ops::splat(2.12194440e-4f)));
  Real p = Ops::splat(1.9875691500e-4f);
  p = Ops::add(Ops::multiply(p, r), Ops::splat(1.3981999507e-3f));
  p = Ops::add(Ops::multiply(p, r), Ops::splat(8.3334519073e-3f));
  p = Ops::add(Ops::multiply(p, r), Ops::splat(4.1665795894e-2f));
  p = Ops::add(Ops::multiply(p, r), Ops::splat(1.6666665459e-1f));
  p = Ops::add(Ops::multiply(p, r), Ops::splat(5.0000001201e-1f));
  p = Ops::add(Ops::add(Ops::multiply(p, Ops::multiply(r, r)), r), Ops::splat(1.0f));
  return Ops::where_less(z, floor, Ops::splat(0.0f), Ops::multiply(p, Ops::power_of_two(biased)));
}

PYRUNTIME_HD float decay(float z) { return decay_with<ScalarOps>(z); }

// At most 2^44 (a little more never happens: e <= 1).
PYRUNTIME_HD uint64_t weight_of(float e) {
  return static_cast<uint64_t>(static_cast<int64_t>(multiply(e, kWeightScale)));
}

// The least mass that satisfies top_p in (0, 1], at least 1: ceil(top_p * mass), exact for top_p >= 2^-39.
PYRUNTIME_HD uint64_t top_p_target(float top_p, uint64_t mass) {
  const uint64_t share = static_cast<uint64_t>(multiply(top_p, 9223372036854775808.0f));  // top_p * 2^63
  const uint64_t high = multiply_high(share, mass), low = share * mass;
  const uint64_t target = (high << 1 | low >> 63) + ((low << 1) != 0 ? 1u : 0u);
  return target == 0 ? 1 : target;
}

// Of candidates with one rank and weight `each`, how many (the lowest ids) reach `target` from `before` < target.
PYRUNTIME_HD uint64_t ties_needed(uint64_t target, uint64_t before, uint64_t each) {
  return (target - before + each - 1) / each;
}

// The natural logarithm of a mass in units of the maximum's weight.
PYRUNTIME_HD float log_mass(uint64_t mass) { return static_cast<float>(log(static_cast<double>(mass) * 0x1p-44)); }

// Uniform in [0, mass).
PYRUNTIME_HD uint64_t draw_target(uint64_t random, uint64_t mass) { return multiply_high(random, mass); }

}  // namespace pyruntime::shared
