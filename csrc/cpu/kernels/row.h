// One row of logits in blocks: its largest values, and what lies above a bound, found without looking at most of it.
#pragma once

#include "../../shared/sampling_math.h"
#include "vec.h"

namespace pyruntime::PYRUNTIME_ISA {
namespace {

constexpr float kInfinity = __builtin_huge_valf();
constexpr int64_t kBlock = 256;
// decay falls to a weight of zero before this.
constexpr float kWeightless = -31.0f;

// sampling_math.h's operations, on sixteen candidates.
struct VectorOps {
  using Real = Vec;
  PYRUNTIME_INLINE Vec splat(float x) { return Vec{} + x; }
  PYRUNTIME_INLINE Vec multiply(Vec a, Vec b) { return a * b; }
  PYRUNTIME_INLINE Vec add(Vec a, Vec b) { return a + b; }
  PYRUNTIME_INLINE Vec power_of_two(Vec biased) {
    const IntVec exponent = (reinterpret_cast<IntVec>(biased) - 0x4b400000 + 127) << 23;
    return reinterpret_cast<Vec>(exponent);
  }
  PYRUNTIME_INLINE Vec where_less(Vec a, Vec b, Vec yes, Vec no) { return a < b ? yes : no; }
};

// float32 logits and the largest of every block of kBlock, as it is and as z of the temperature at hand.
struct Row {
  const float* x;
  int64_t count;
  float* maxima;
  float* block_z;
  float top;

  int64_t blocks() const { return (count + kBlock - 1) / kBlock; }
  int64_t end_of(int64_t block) const { return block * kBlock + kBlock < count ? (block + 1) * kBlock : count; }
};

// The `wide` <= kLanes values from x on, -inf after them.
PYRUNTIME_INLINE Vec load_logits(const float* x, int64_t wide) {
  if (wide >= kLanes) return load_as<Vec>(x);
  const IntVec lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const Vec v = load_first<Vec>(x, wide, sizeof(float));
  return lane < static_cast<int32_t>(wide) ? v : splat(-kInfinity);
}

// Fills maxima and top. False: the row holds NaN or +inf.
inline bool find_maxima(Row& row) {
  IntVec bad{};
  row.top = -kInfinity;
  for (int64_t block = 0; block < row.blocks(); ++block) {
    const int64_t begin = block * kBlock, end = row.end_of(block);
    Vec top = splat(-kInfinity);
    if (end - begin == kBlock) {
#pragma GCC unroll 8
      for (int64_t i = 0; i < kBlock; i += kLanes) {
        const Vec v = load_as<Vec>(row.x + begin + i);
        bad |= ~(v < splat(kInfinity));
        top = larger(v, top);
      }
    } else {
      for (int64_t i = begin; i < end; i += kLanes) {
        const Vec v = load_logits(row.x + i, end - i);
        bad |= ~(v < splat(kInfinity));
        top = larger(v, top);
      }
    }
    row.maxima[block] = maximum_of(top);
    row.top = row.maxima[block] > row.top ? row.maxima[block] : row.top;
  }
  for (int64_t i = 0; i < kLanes; ++i) {
    if (bad[i]) return false;
  }
  return true;
}

inline void shift_maxima(const Row& row, float temperature) {
  for (int64_t b = 0; b < row.blocks(); b += kLanes) {
    const Vec z = (load_as<Vec>(row.maxima + b) - row.top) / temperature;
    memcpy(row.block_z + b, &z, sizeof(z));
  }
}

// Candidates in id order: z as sampling_math.h defines it, e = decay(z).
struct Candidates {
  float* z;
  float* e;
  int32_t* ids;
  int64_t count;
};

PYRUNTIME_INLINE Vec z_of(const Row& row, int64_t i, int64_t wide, float temperature) {
  return (load_logits(row.x + i, wide) - row.top) / temperature;
}

// Of sixteen ids from `first` on those with z >= bound. What is written past the last one is written again, or never
// read: the buffers are longer than the vocabulary by a vector.
PYRUNTIME_INLINE void append(Vec z, int64_t first, int64_t wide, float bound, Candidates& c) {
  const IntVec lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const IntVec ids = lane + static_cast<int32_t>(first);
#if defined(__AVX512F__)
  const unsigned inside = wide >= kLanes ? 0xffffu : (1u << wide) - 1;
  const auto kept = static_cast<__mmask16>(
      _mm512_cmp_ps_mask(reinterpret_cast<__m512>(z), reinterpret_cast<__m512>(splat(bound)), _CMP_GE_OQ) & inside);
  if (kept == 0) return;
  const __m512 values = _mm512_maskz_compress_ps(kept, reinterpret_cast<__m512>(z));
  const __m512i names = _mm512_maskz_compress_epi32(kept, reinterpret_cast<__m512i>(ids));
  memcpy(c.z + c.count, &values, sizeof(values));
  memcpy(c.ids + c.count, &names, sizeof(names));
  c.count += __builtin_popcount(kept);
#else
  const IntVec kept = z >= splat(bound);
  for (int64_t j = 0; j < wide; ++j) {
    c.z[c.count] = z[j];
    c.ids[c.count] = ids[j];
    c.count += kept[j] & 1;
  }
#endif
}

// Every id with z >= bound.
inline void gather(const Row& row, float temperature, float bound, Candidates& c) {
  c.count = 0;
  for (int64_t block = 0; block < row.blocks(); ++block) {
    if (row.block_z[block] < bound) continue;
    const int64_t end = row.end_of(block);
    for (int64_t i = block * kBlock; i < end; i += kLanes) {
      const int64_t wide = end - i < kLanes ? end - i : kLanes;
      append(z_of(row, i, wide, temperature), i, wide, bound, c);
    }
  }
  for (int64_t i = 0; i < c.count; i += kLanes) {
    const int64_t wide = c.count - i;
    store_narrow<Float32>(c.e + i, shared::decay_with<VectorOps>(load_logits(c.z + i, wide)), wide);
  }
}

// The sum of weights of a block, as two sums of 32 bits a lane: floor(e * 2^44) is 2^22 times the integral part of
// e * 2^22 and 2^22 times what is left of it.
PYRUNTIME_INLINE uint64_t block_mass(const Row& row, int64_t block, float temperature) {
  if (row.block_z[block] < kWeightless) return 0;
  const int64_t end = row.end_of(block);
  IntVec high{}, low{};
  for (int64_t i = block * kBlock; i < end; i += kLanes) {
    const Vec scaled = shared::decay_with<VectorOps>(z_of(row, i, end - i, temperature)) * 4194304.0f;
    const IntVec whole = __builtin_convertvector(scaled, IntVec);
    const Vec rest = (scaled - __builtin_convertvector(whole, Vec)) * 4194304.0f;
    high += whole;
    low += __builtin_convertvector(rest, IntVec);
  }
  uint64_t total = 0;
  for (int64_t i = 0; i < kLanes; ++i) {
    total += (static_cast<uint64_t>(high[i]) << 22) + static_cast<uint64_t>(low[i]);
  }
  return total;
}

// The mass of the whole row; masses (may be null) receives that of every block.
inline uint64_t row_mass(const Row& row, float temperature, uint64_t* masses) {
  uint64_t total = 0;
  for (int64_t block = 0; block < row.blocks(); ++block) {
    const uint64_t mass = block_mass(row, block, temperature);
    if (masses != nullptr) masses[block] = mass;
    total += mass;
  }
  return total;
}

}  // namespace
}  // namespace pyruntime::PYRUNTIME_ISA
