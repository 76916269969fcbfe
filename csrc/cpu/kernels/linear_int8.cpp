// The linear over int8 weights and rows, for few rows and for many. A weight matrix lies in panels of sixteen columns
// as kernels.h says, so that a vector holds four neighbours in depth of every column: a row's four meet it in every
// lane. Sums of a group are whole numbers and exact, and what is added up of them in float32 goes in the order of
// depth: a row's result does not depend on the rows beside it, nor on the instruction set but for the rounding of the
// last steps.
#include "activation.h"

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
using Sum = int32_t;
PYRUNTIME_INLINE void add(Sums& sums, WordVec w, uint32_t x) {
  sums = reinterpret_cast<Sums>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sums), reinterpret_cast<__m512i>(w),
                                                    _mm512_set1_epi32(static_cast<int32_t>(x))));
}
#else
// In float32, where whole numbers up to 2^24 are exact; a group's stay below 2^23.
using Sums = Vec;
using Sum = float;
PYRUNTIME_INLINE void add(Sums& sums, WordVec w, uint32_t x) {
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const IntVec bytes = reinterpret_cast<IntVec>((w >> (8 * j)) & 0xffu);
    sums += __builtin_convertvector(bytes, Vec) * static_cast<float>(static_cast<int8_t>(x >> (8 * j)));
  }
}
#endif
PYRUNTIME_INLINE Vec to_floats(IntVec sums) { return __builtin_convertvector(sums, Vec); }
PYRUNTIME_INLINE Vec to_floats(Vec sums) { return sums; }

int64_t panel_bytes(const Int8Args& a) { return (a.words + 1) * 64; }

// The products of R rows from `row` on and the panels `w`, without the scales of columns, to out[r * P + p]. `ahead`:
// how far behind each word something is to be read into the cache that will be wanted next.
template <int R, int P>
__attribute__((noinline)) void multiply(const Int8Args& a, int64_t row, const uint8_t* const* w, int64_t ahead,
                                        Vec* out) {
  Vec totals[R * P] = {};
  for (int64_t group = 0; group < a.groups; ++group) {
    const int64_t first = group * kWords, end = first + kWords < a.words ? first + kWords : a.words;
    Sums sums[R * P];
#pragma GCC unroll 12
    for (int i = 0; i < R * P; ++i) sums[i] = Sums{} + static_cast<Sum>(a.offsets[(row + i / P) * a.groups + group]);
    const int8_t* x = a.q + row * a.q_row;
    for (int64_t word = first; word < end; ++word) {
      WordVec columns[P];
#pragma GCC unroll 3
      for (int p = 0; p < P; ++p) {
        columns[p] = load_as<WordVec>(w[p] + word * 64);
        if (ahead != 0) __builtin_prefetch(w[p] + word * 64 + ahead, 0, 2);
      }
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        uint32_t bits;
        memcpy(&bits, x + r * a.q_row + word * 4, 4);
#pragma GCC unroll 3
        for (int p = 0; p < P; ++p) add(sums[r * P + p], columns[p], bits);
      }
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const float scale = a.row_scales[(row + r) * a.groups + group];
#pragma GCC unroll 3
      for (int p = 0; p < P; ++p) totals[r * P + p] = to_floats(sums[r * P + p]) * scale + totals[r * P + p];
    }
  }
  memcpy(out, totals, sizeof(totals));
}

// What R rows of a tile come to, from their products.
template <class T, int R, int P, bool Gated, Activation A>
PYRUNTIME_INLINE void finish(const Int8Args& a, int64_t row, int64_t panel, const uint8_t* const* w,
                             const Vec* products) {
  using Element = typename T::Element;
  Element* out = static_cast<Element*>(a.out) + row * a.out_row;
#pragma GCC unroll 3
  for (int p = 0; p < (Gated ? 1 : P); ++p) {
    const int64_t column = (panel + p) * 16, wide = a.columns - column < 16 ? a.columns - column : 16;
    const Vec scales = load_as<Vec>(w[p] + a.words * 64);
    const Vec bias = a.bias == nullptr ? Vec{} : load_first<Vec>(a.bias + column, wide, sizeof(float));
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      Vec y = activate<A>(products[r * P + p] * scales + bias);
      if constexpr (Gated) y *= products[r * P + 1] * load_as<Vec>(w[1] + a.words * 64);
      store_narrow<T>(out + r * a.out_row + column, y, wide);
    }
  }
}

// What panels [panel, panel + P) of every row come to.
template <class T, int P, bool Gated, Activation A>
void run_panels(const Int8Args& a, int64_t panel, int64_t end) {
  constexpr int kOut = Gated ? 1 : P, kMost = kMostSums / P > 1 ? kMostSums / P : 1;
  const int64_t bytes = panel_bytes(a);
  const uint8_t* w[P];
  for (int p = 0; p < kOut; ++p) w[p] = a.w + (panel + p) * bytes;
  if constexpr (Gated) w[1] = a.up + panel * bytes;
  int64_t row = a.row_begin, ahead = panel + kOut < end ? kOut * bytes : 0;
  const auto take = [&]<int R>(std::integral_constant<int, R>) {
    Vec products[R * P];
    multiply<R, P>(a, row, w, ahead, products);
    finish<T, R, P, Gated, A>(a, row, panel, w, products);
    row += R, ahead = 0;  // reading ahead once is enough
  };
  while (a.row_end - row >= kMost) take(std::integral_constant<int, kMost>{});
  if constexpr (kMost > 4) {
    while (a.row_end - row >= 4) take(std::integral_constant<int, 4>{});
  }
  if constexpr (kMost > 2) {
    while (a.row_end - row >= 2) take(std::integral_constant<int, 2>{});
  }
  while (a.row_end - row >= 1) take(std::integral_constant<int, 1>{});
}

template <class T, Activation A>
void run(const Int8Args& a, int64_t panel, int64_t end) {
  if (a.up != nullptr) {
    for (; panel < end; ++panel) run_panels<T, 2, true, A>(a, panel, end);
    return;
  }
  for (; panel + kMostPanels <= end; panel += kMostPanels) run_panels<T, kMostPanels, false, A>(a, panel, end);
  for (; panel < end; ++panel) run_panels<T, 1, false, A>(a, panel, end);
}

template <class T>
void run_as(const Int8Args& a, int64_t begin, int64_t end) {
  with_activation(a.activation, [&](auto activation) { run<T, decltype(activation)::value>(a, begin, end); });
}

// The lowest byte of each lane.
PYRUNTIME_INLINE void store_low_bytes(int8_t* p, IntVec v) {
#if defined(__AVX512F__)
  _mm512_mask_cvtepi32_storeu_epi8(p, 0xffff, reinterpret_cast<__m512i>(v));
#else
  typedef int8_t Bytes __attribute__((vector_size(16)));
  const Bytes bytes = __builtin_convertvector(v, Bytes);
  memcpy(p, &bytes, sizeof(bytes));
#endif
}

template <class T>
PYRUNTIME_INLINE Vec load_x(const typename T::Element* p, int64_t count) {
  using Part = std::conditional_t<sizeof(typename T::Element) == 4, Vec, HalfWords>;
  if (count >= kLanes) return widen(load_as<Part>(p), T{});
  return widen(load_first<Part>(p, count, sizeof(typename T::Element)), T{});
}

// The bits of magnitudes are ordered as the magnitudes are, infinity and NaN above all of them.
constexpr int32_t kInfinity = 0x7f800000;
PYRUNTIME_INLINE IntVec magnitude_bits(Vec x) { return reinterpret_cast<IntVec>(x) & 0x7fffffff; }
PYRUNTIME_INLINE IntVec larger_of(IntVec a, IntVec b) { return a > b ? a : b; }
PYRUNTIME_INLINE int32_t largest_of(IntVec v) {
  const IntVec lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#pragma GCC unroll 4
  for (int32_t distance = 8; distance > 0; distance /= 2) v = larger_of(v, __builtin_shuffle(v, lane ^ distance));
  return v[0];
}
PYRUNTIME_INLINE int32_t total_of(WordVec v) {
  const IntVec lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#pragma GCC unroll 4
  for (int32_t distance = 8; distance > 0; distance /= 2) v += __builtin_shuffle(v, lane ^ distance);
  return static_cast<int32_t>(v[0]);
}

// `count` <= kInt8Group elements of x as int8 of one scale, zeros after them. A group with NaN or infinity has the
// scale NaN, and with it the whole row.
template <class T, bool Whole>
PYRUNTIME_INLINE void quantize_group(const typename T::Element* x, int64_t count, int8_t* q, float& scale,
                                     int32_t& offset) {
  constexpr int kVectors = kInt8Group / kLanes;
  Vec values[kVectors];
  IntVec largest{};
#pragma GCC unroll 8
  for (int i = 0; i < kVectors; ++i) {
    const int64_t left = Whole ? kLanes : count - i * kLanes;
    values[i] = left > 0 ? load_x<T>(x + i * kLanes, left) : Vec{};
    largest = larger_of(magnitude_bits(values[i]), largest);
  }
  const int32_t top_bits = largest_of(largest);
  float top;
  memcpy(&top, &top_bits, sizeof(top));
  // Below, 127 / top would overflow: such a group counts as zeros.
  if (!(top_bits < kInfinity && top > 1e-30f)) {
    memset(q, 0, kInt8Group);
    scale = top - top, offset = 0;
    return;
  }
  const float inverse = 127.0f / top;
  scale = top / 127.0f;
  // 1.5 * 2^23: adding it rounds to a whole number, which then stands in the lowest bits.
  constexpr float kRound = 12582912.0f;
  WordVec total = WordVec{} - kVectors * 0x4b400000u;
#pragma GCC unroll 8
  for (int i = 0; i < kVectors; ++i) {
    const IntVec whole = reinterpret_cast<IntVec>(values[i] * inverse + kRound);
    total += reinterpret_cast<WordVec>(whole);
    store_low_bytes(q + i * kLanes, whole);
  }
  offset = -128 * total_of(total);
}

template <class T>
void quantize_as(const QuantizeArgs& a, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const auto* x = static_cast<const typename T::Element*>(a.x) + row * a.x_row;
    for (int64_t group = 0; group < a.groups; ++group) {
      const int64_t first = group * kInt8Group, left = a.depth - first, at = row * a.groups + group;
      int8_t* q = a.q + row * a.q_row + first;
      if (left >= kInt8Group) {
        quantize_group<T, true>(x + first, kInt8Group, q, a.row_scales[at], a.offsets[at]);
      } else {
        quantize_group<T, false>(x + first, left, q, a.row_scales[at], a.offsets[at]);
      }
    }
  }
}

}  // namespace

void linear_int8(const Int8Args& a, int64_t begin, int64_t end) {
  switch (a.dtype) {
    case DType::kFloat32:
      return run_as<Float32>(a, begin, end);
    case DType::kBFloat16:
      return run_as<BFloat16>(a, begin, end);
    case DType::kFloat16:
      return run_as<Float16>(a, begin, end);
  }
}

void quantize_rows(const QuantizeArgs& a, int64_t begin, int64_t end) {
  switch (a.dtype) {
    case DType::kFloat32:
      return quantize_as<Float32>(a, begin, end);
    case DType::kBFloat16:
      return quantize_as<BFloat16>(a, begin, end);
    case DType::kFloat16:
      return quantize_as<Float16>(a, begin, end);
  }
}

}  // namespace pyruntime::PYRUNTIME_ISA
