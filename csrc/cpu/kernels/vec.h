// Sixteen floats as one value, through the compiler's vector extension: one AVX-512 register, two of AVX2, four of SSE.
#pragma once

#include <cstring>
#include <type_traits>

#include "kernels.h"
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#define PYRUNTIME_INLINE static inline __attribute__((always_inline))

namespace pyruntime::PYRUNTIME_ISA {

constexpr int64_t kLanes = 16;

typedef float Vec __attribute__((vector_size(64)));
typedef int32_t IntVec __attribute__((vector_size(64)));
typedef uint32_t WordVec __attribute__((vector_size(64)));
typedef uint16_t HalfWords __attribute__((vector_size(32)));
typedef _Float16 HalfVec __attribute__((vector_size(32)));

PYRUNTIME_INLINE Vec splat(float x) { return Vec{} + x; }

struct Float32 {
  using Element = float;
  static constexpr int64_t kStep = 16;
  using Chunk = Vec;
};
struct BFloat16 {
  using Element = uint16_t;
#if defined(__AVX512BF16__)
  static constexpr int64_t kStep = 32;
  typedef uint16_t Chunk __attribute__((vector_size(64)));
#else
  static constexpr int64_t kStep = 16;
  using Chunk = HalfWords;
#endif
};
struct Float16 {
  using Element = uint16_t;
  static constexpr int64_t kStep = 16;
  using Chunk = HalfWords;
};

template <class V>
PYRUNTIME_INLINE V load_as(const void* p) {
  V v;
  memcpy(&v, p, sizeof(V));
  return v;
}
#if defined(__AVX512BW__)
// A mask of the first `count` <= 64 bytes of a vector.
PYRUNTIME_INLINE uint64_t first_bytes(int64_t count) { return _bzhi_u64(~uint64_t{0}, static_cast<uint32_t>(count)); }
#endif
// The first `count` elements of `size` bytes, zeros after them; nothing beyond them is read.
template <class V>
PYRUNTIME_INLINE V load_first(const void* p, int64_t count, int64_t size) {
#if defined(__AVX512BW__)
  // A copy of unknown length goes through memory, byte by byte or by a call.
  if constexpr (sizeof(V) == 64) {
    return reinterpret_cast<V>(_mm512_maskz_loadu_epi8(first_bytes(count * size), p));
  } else {
    static_assert(sizeof(V) == 32);
    return reinterpret_cast<V>(_mm256_maskz_loadu_epi8(static_cast<uint32_t>(first_bytes(count * size)), p));
  }
#else
  V v{};
  memcpy(&v, p, static_cast<size_t>(count * size));
  return v;
#endif
}

PYRUNTIME_INLINE Vec widen(Vec v, Float32) { return v; }
// Compilers make two halves of what AVX-512 does at once.
PYRUNTIME_INLINE WordVec to_words(HalfWords v) {
#if defined(__AVX512F__)
  return reinterpret_cast<WordVec>(_mm512_maskz_cvtepu16_epi32(0xffff, reinterpret_cast<__m256i>(v)));
#else
  return __builtin_convertvector(v, WordVec);
#endif
}
PYRUNTIME_INLINE Vec widen(HalfWords v, BFloat16) { return reinterpret_cast<Vec>(to_words(v) << 16); }
PYRUNTIME_INLINE Vec widen(HalfWords v, Float16) { return __builtin_convertvector(reinterpret_cast<HalfVec>(v), Vec); }

// The first `count` values of x in float32, zeros after them.
template <class T>
PYRUNTIME_INLINE Vec load_x(const typename T::Element* p, int64_t count) {
  using Part = std::conditional_t<sizeof(typename T::Element) == 4, Vec, HalfWords>;
  if (count >= kLanes) return widen(load_as<Part>(p), T{});
  return widen(load_first<Part>(p, count, sizeof(typename T::Element)), T{});
}

PYRUNTIME_INLINE HalfWords narrow(Vec v, BFloat16) {
#if defined(__AVX512BF16__)
  // Values below the normal range, 1e-38, become zero.
  return reinterpret_cast<HalfWords>(_mm512_cvtneps_pbh(reinterpret_cast<__m512>(v)));
#endif
  WordVec words = reinterpret_cast<WordVec>(v);
  WordVec rounded = (words + 0x7fffu + ((words >> 16) & 1u)) >> 16;
  WordVec quiet = (words >> 16) | 0x40u;
  rounded = (v == v) ? rounded : quiet;
  return __builtin_convertvector(rounded, HalfWords);
}
PYRUNTIME_INLINE HalfWords narrow(Vec v, Float16) {
  return reinterpret_cast<HalfWords>(__builtin_convertvector(v, HalfVec));
}
PYRUNTIME_INLINE Vec narrow(Vec v, Float32) { return v; }

template <class T>
PYRUNTIME_INLINE void store_narrow(void* p, Vec v, int64_t count) {
  auto n = narrow(v, T{});
  if (count >= kLanes) {
    memcpy(p, &n, sizeof(n));
    return;
  }
#if defined(__AVX512BW__)
  const uint64_t mask = first_bytes(count * static_cast<int64_t>(sizeof(typename T::Element)));
  if constexpr (sizeof(n) == 64) {
    _mm512_mask_storeu_epi8(p, mask, reinterpret_cast<__m512i>(n));
  } else {
    _mm256_mask_storeu_epi8(p, static_cast<uint32_t>(mask), reinterpret_cast<__m256i>(n));
  }
#else
  memcpy(p, &n, static_cast<size_t>(count) * sizeof(typename T::Element));
#endif
}

// accumulator + products of two chunks. Both forms keep float32 sums.
PYRUNTIME_INLINE Vec multiply_add(Vec a, Vec b, Vec c, Float32) { return a * b + c; }
PYRUNTIME_INLINE Vec multiply_add(HalfWords a, HalfWords b, Vec c, Float16) {
  return widen(a, Float16{}) * widen(b, Float16{}) + c;
}
#if defined(__AVX512BF16__)
PYRUNTIME_INLINE Vec multiply_add(BFloat16::Chunk a, BFloat16::Chunk b, Vec c, BFloat16) {
  return reinterpret_cast<Vec>(
      _mm512_dpbf16_ps(reinterpret_cast<__m512>(c), reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b)));
}
#else
PYRUNTIME_INLINE Vec multiply_add(HalfWords a, HalfWords b, Vec c, BFloat16) {
  return widen(a, BFloat16{}) * widen(b, BFloat16{}) + c;
}
#endif

// In one instruction what compilers make a comparison and a blend of, since NaN must not change places: b where there
// is one.
PYRUNTIME_INLINE Vec larger(Vec a, Vec b) {
#if defined(__AVX512F__)
  return reinterpret_cast<Vec>(_mm512_maskz_max_ps(0xffff, reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b)));
#else
  return a > b ? a : b;
#endif
}

// Lane sums of a and b, halved in width: out[2i], out[2i+1] = two lanes of a added, two lanes of b added.
PYRUNTIME_INLINE Vec fold_quarters(Vec a, Vec b) {
  Vec low = __builtin_shuffle(a, b, (IntVec){0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23});
  Vec high = __builtin_shuffle(a, b, (IntVec){8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31});
  return low + high;
}

// The sums of sixteen vectors' lanes, vector i's sum in lane i. Each sum is the same tree whatever i is.
PYRUNTIME_INLINE Vec sum_lanes(const Vec (&v)[16]) {
  Vec a[8], b[4], c[2];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) a[i] = fold_quarters(v[i], v[i + 8]);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) b[i] = fold_quarters(a[i], a[i + 4]);
  c[0] = fold_quarters(b[0], b[2]);
  c[1] = fold_quarters(b[1], b[3]);
  return fold_quarters(c[0], c[1]);
}

// Sixteen vectors as a matrix, transposed: single lanes, then pairs are interleaved within quarters of a vector, then
// whole quarters change places, for none of which a processor needs an index vector.
PYRUNTIME_INLINE void transpose(Vec (&v)[16]) {
  Vec single[16], pairs[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    single[i] = __builtin_shuffle(v[i], v[i + 1], (IntVec){0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29});
    single[i + 1] =
        __builtin_shuffle(v[i], v[i + 1], (IntVec){2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31});
  }
  const IntVec low = {0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29}, high = low + 2;
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      pairs[i + 2 * j] = __builtin_shuffle(single[i + j], single[i + j + 2], low);
      pairs[i + 2 * j + 1] = __builtin_shuffle(single[i + j], single[i + j + 2], high);
    }
  }
  const IntVec even = {0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27}, odd = even + 4;
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const Vec a = __builtin_shuffle(pairs[i], pairs[i + 4], even), b = __builtin_shuffle(pairs[i], pairs[i + 4], odd);
    const Vec c = __builtin_shuffle(pairs[i + 8], pairs[i + 12], even);
    const Vec d = __builtin_shuffle(pairs[i + 8], pairs[i + 12], odd);
    v[i] = __builtin_shuffle(a, c, even), v[i + 4] = __builtin_shuffle(b, d, even);
    v[i + 8] = __builtin_shuffle(a, c, odd), v[i + 12] = __builtin_shuffle(b, d, odd);
  }
}

// Lane i holds lane i ^ distance of v.
PYRUNTIME_INLINE Vec exchange(Vec v, int32_t distance) {
  const IntVec lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return __builtin_shuffle(v, lane ^ distance);
}
PYRUNTIME_INLINE float sum_of(Vec v) {
#pragma GCC unroll 4
  for (int32_t distance = 8; distance > 0; distance /= 2) v += exchange(v, distance);
  return v[0];
}
PYRUNTIME_INLINE float maximum_of(Vec v) {
#pragma GCC unroll 4
  for (int32_t distance = 8; distance > 0; distance /= 2) v = larger(v, exchange(v, distance));
  return v[0];
}
// NaN wins.
PYRUNTIME_INLINE Vec maximum_or_nan(Vec a, Vec b) { return (a > b) | (a != a) ? a : b; }

// e^x to 1.2 ulp for x <= 88; 0 below -87.3 (and for -inf). Polynomial: Cephes expf.
PYRUNTIME_INLINE Vec exponential(Vec x) {
  const Vec kRound = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  Vec clamped = x < splat(-87.3f) ? splat(-87.3f) : x;
  clamped = clamped > splat(88.0f) ? splat(88.0f) : clamped;
  Vec shifted = clamped * 1.44269504088896341f + kRound;
  Vec n = shifted - kRound;
  Vec r = clamped - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  Vec p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  IntVec exponent = (reinterpret_cast<IntVec>(shifted) - 0x4b400000 + 127) << 23;
  Vec result = p * reinterpret_cast<Vec>(exponent);
  return x < splat(-87.3f) ? Vec{} : result;
}

PYRUNTIME_INLINE Vec hyperbolic_tangent(Vec x) {
  Vec limited = x > splat(20.0f) ? splat(20.0f) : x;
  limited = limited < splat(-20.0f) ? splat(-20.0f) : limited;
  return 1.0f - 2.0f / (exponential(limited * 2.0f) + 1.0f);
}

}  // namespace pyruntime::PYRUNTIME_ISA
