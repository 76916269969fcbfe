// The linear over int8 weights and rows, for few rows and for many.
#include "activation.h"
#include "int8_products.h"

namespace pyruntime::PYRUNTIME_ISA {
namespace {

// What R rows of a tile come to, from their products.
template <class T, int R, int P, bool Gated, Activation A>
PYRUNTIME_INLINE void finish(const Int8Args& a, int64_t row, int64_t panel, const Vec* products) {
  using Element = typename T::Element;
  Element* out = static_cast<Element*>(a.out) + row * a.out_row;
#pragma GCC unroll 3
  for (int p = 0; p < (Gated ? 1 : P); ++p) {
    const int64_t column = (panel + p) * 16, wide = a.columns - column < 16 ? a.columns - column : 16;
    const Vec bias = a.bias == nullptr ? Vec{} : load_first<Vec>(a.bias + column, wide, sizeof(float));
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      Vec y = activate<A>(products[r * P + p] + bias);
      if constexpr (Gated) y *= products[r * P + 1];
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
  int64_t row = a.row_begin;
  // Of the next panels, while those at hand are multiplied.
  const int64_t left = end - panel - kOut, tiles = (a.row_end - a.row_begin + kMost - 1) / kMost;
  const int64_t count = (left < kOut ? left : kOut) * bytes, steps = tiles * a.words;
  Next next{read_within(w[0] + kOut * bytes, count, steps), {}};
  if constexpr (Gated) next.second = read_within(w[1] + bytes, count, steps);
  const auto take = [&]<int R>(std::integral_constant<int, R>) {
    Vec products[R * P];
    multiply<R, P, false>(a, row, w, next, products);
    finish<T, R, P, Gated, A>(a, row, panel, products);
    row += R;
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
PYRUNTIME_INLINE void store_low_bytes(uint8_t* p, IntVec v) {
#if defined(__AVX512F__)
  _mm512_mask_cvtepi32_storeu_epi8(p, 0xffff, reinterpret_cast<__m512i>(v));
#else
  typedef uint8_t Bytes __attribute__((vector_size(16)));
  const Bytes bytes = __builtin_convertvector(v, Bytes);
  memcpy(p, &bytes, sizeof(bytes));
#endif
}

// As larger.
PYRUNTIME_INLINE Vec smaller(Vec a, Vec b) {
#if defined(__AVX512F__)
  return reinterpret_cast<Vec>(_mm512_maskz_min_ps(0xffff, reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b)));
#else
  return a < b ? a : b;
#endif
}

// The largest lane of a in the lower half, that of b in the upper one.
PYRUNTIME_INLINE Vec largest_of_both(Vec a, Vec b) {
  const IntVec lower = {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23};
  Vec v = larger(__builtin_shuffle(a, b, lower), __builtin_shuffle(a, b, lower + 8));
#pragma GCC unroll 3
  for (int32_t distance = 4; distance > 0; distance /= 2) v = larger(v, exchange(v, distance));
  return v;
}
PYRUNTIME_INLINE bool any_of(IntVec v) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask(reinterpret_cast<__m512i>(v), reinterpret_cast<__m512i>(v)) != 0;
#else
  int32_t any = 0;
  for (int64_t i = 0; i < kLanes; ++i) any |= v[i];
  return any != 0;
#endif
}

PYRUNTIME_INLINE void quantize_nothing(uint8_t* q, float& scale, float& zero, float own_scale) {
  memset(q, 0, kInt8Group);
  scale = own_scale, zero = 0.0f;
}

// `count` <= kInt8Group elements of x as whole numbers from 0 to 255 of one scale, 0 a whole number among them, so that
// values all on one side, or an outlier there, leave no half of the numbers unused. A group with NaN or infinity has
// the scale NaN, and with it the whole row.
template <class T, bool Whole>
PYRUNTIME_INLINE void quantize_group(const typename T::Element* x, int64_t count, uint8_t* q, float& scale,
                                     float& zero) {
  constexpr int kVectors = kInt8Group / kLanes;
  Vec values[kVectors], most{}, least{};
#pragma GCC unroll 8
  for (int i = 0; i < kVectors; ++i) {
    const int64_t left = Whole ? kLanes : count - i * kLanes;
    values[i] = left > 0 ? load_x<T>(x + i * kLanes, left) : Vec{};
    most = larger(values[i], most), least = smaller(values[i], least);
  }
  const Vec ends = largest_of_both(most, -least);
  const float low = -ends[8];
  // In halves, which do not overflow.
  const float half = ends[0] * 0.5f + ends[8] * 0.5f;
  // Below, 127 / half would overflow: such a group counts as zeros.
  if (half <= 1e-30f) return quantize_nothing(q, scale, zero, 0.0f);
  // Two roundings meet in a number: the largest is 254 and at most one more.
  const float inverse = 127.0f / half;
  scale = half / 127.0f;
  // 1.5 * 2^23: adding it rounds to a whole number, which then stands in the lowest bits.
  constexpr float kRound = 12582912.0f;
  const float shifted = kRound - low * inverse;
  zero = shifted - kRound;
  IntVec bits{};
#pragma GCC unroll 8
  for (int i = 0; i < kVectors; ++i) {
    const IntVec whole = reinterpret_cast<IntVec>(values[i] * inverse + shifted);
    bits |= whole;
    store_low_bytes(q + i * kLanes, whole);
  }
  // Numbers near kRound have none of these bits of an exponent, NaN has them all; NaN is neither most nor least.
  if (any_of(bits & 0x34000000)) quantize_nothing(q, scale, zero, __builtin_nanf(""));
}

template <class T>
void quantize_as(const QuantizeArgs& a, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const auto* x = static_cast<const typename T::Element*>(a.x) + row * a.x_row;
    for (int64_t group = 0; group < a.groups; ++group) {
      const int64_t first = group * kInt8Group, left = a.depth - first, at = row * a.groups + group;
      uint8_t* q = a.q + row * a.q_row + first;
      if (left >= kInt8Group) {
        quantize_group<T, true>(x + first, kInt8Group, q, a.row_scales[at], a.zeros[at]);
      } else {
        quantize_group<T, false>(x + first, left, q, a.row_scales[at], a.zeros[at]);
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
