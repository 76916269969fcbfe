// Which columns can have the largest product with a row, by bounds around the products in int8. With x' and w' what x
// and w are as int8,
//
//   |x·w - x'·w'| <= |x| |w - w'| + |x - x'| |w'|                            (Cauchy and Schwarz)
//
// and each of the two products is computed with an error of at most gamma |x| |w| more, gamma = n u / (1 - n u) for n
// roundings to u = 2^-24 (Higham, Accuracy and Stability of Numerical Algorithms, 3.1), in whatever order.
#include "int8_products.h"

namespace pyruntime::PYRUNTIME_ISA {
namespace {

constexpr float kInfinity = __builtin_huge_valf();
// Rows of this length lose nothing by underflow that the bounds below do not cover, and none of their products
// overflows.
constexpr float kShortest = 0x1p-40f, kLongest = 0x1p40f;
constexpr int64_t kDeepest = 65536;

typedef uint8_t Bytes __attribute__((vector_size(16)));

template <class T>
void weigh(const QuantizeArgs& a, int64_t row, float& error_weight, float& length_weight) {
  const auto* x = static_cast<const typename T::Element*>(a.x) + row * a.x_row;
  Vec squares{}, differences{};
  for (int64_t k = 0; k < a.depth; k += kLanes) {
    const int64_t group = row * a.groups + k / kInt8Group, left = a.depth - k;
    const Vec exact = load_x<T>(x + k, left < kLanes ? left : kLanes);
    const Vec whole = __builtin_convertvector(load_as<Bytes>(a.q + row * a.q_row + k), Vec);
    // Past the depth, too, where both are zero.
    const Vec difference = exact - (whole - a.zeros[group]) * a.row_scales[group];
    squares += exact * exact, differences += difference * difference;
  }
  const float roundings = static_cast<float>(a.depth + 16);
  const float up = 1.0f + roundings * 0x1p-23f;
  const float length = __builtin_sqrtf(sum_of(squares)) * up;
  // The second part is more than what rounding, and squares too small for float32, take from a difference.
  const float error = __builtin_sqrtf(sum_of(differences)) * up + length * 0x1p-16f;
  const float gamma = (2.0f * roundings + static_cast<float>(a.groups)) * 0x1.05p-24f;
  // The last factor is for the roundings of the weights themselves, and of the bounds that they make.
  constexpr float kMore = 1.0f + 0x1p-18f;
  const bool holds = length >= kShortest && length <= kLongest && error <= kLongest && a.depth <= kDeepest;
  error_weight = holds ? length * (1.0f + gamma) * kMore : __builtin_nanf("");
  length_weight = holds ? (error * (1.0f + gamma) + 2.0f * gamma * length) * kMore : __builtin_nanf("");
}

PYRUNTIME_INLINE Vec larger_of_quarters(Vec a, Vec b) {
  const Vec low = __builtin_shuffle(a, b, (IntVec){0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23});
  const Vec high = __builtin_shuffle(a, b, (IntVec){8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31});
  return larger(low, high);
}

// The largest lane of vector i in lane i.
PYRUNTIME_INLINE Vec largest_lanes(const Vec (&v)[16]) {
  Vec a[8], b[4];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) a[i] = larger_of_quarters(v[i], v[i + 8]);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) b[i] = larger_of_quarters(a[i], a[i + 4]);
  return larger_of_quarters(larger_of_quarters(b[0], b[2]), larger_of_quarters(b[1], b[3]));
}

// R rows from `row` on against P panels from `panel` on, which `w` points to.
template <int R, int P>
void bound(const ScreenArgs& s, int64_t row, int64_t panel, const uint8_t* const* w, Next& next, Vec* lows) {
  Vec products[16] = {};
  multiply<R, P, P == 1>(s.product, row, w, next, products);
#pragma GCC unroll 3
  for (int p = 0; p < P; ++p) {
    const Vec errors = load_as<Vec>(s.errors + (panel + p) * 16), lengths = load_as<Vec>(s.lengths + (panel + p) * 16);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const Vec margin = errors * s.error_weights[row + r] + lengths * s.length_weights[row + r];
      lows[row + r] = larger(products[r * P + p] - margin, lows[row + r]);
      products[r * P + p] += margin;
    }
  }
  const Vec tops = largest_lanes(products);
  for (int p = 0; p < P; ++p) {
    const int64_t block = (panel + p) / 16, place = (panel + p) % 16;
    for (int r = 0; r < R; ++r) s.tops[(block * s.rows + row + r) * 16 + place] = tops[r * P + p];
  }
}

template <int P, int R>
void bound_some(const ScreenArgs& s, int64_t row, int64_t rows, int64_t panel, const uint8_t* const* w, Next& next,
                Vec* lows) {
  if (rows == R) return bound<R, P>(s, row, panel, w, next, lows);
  if constexpr (R > 1) bound_some<P, R - 1>(s, row, rows, panel, w, next, lows);
}

// All rows against P panels, in tiles of about one size: few rows in one, so that the matrix is read in one run.
template <int P>
void bound_panels(const ScreenArgs& s, int64_t panel, Vec* lows) {
  constexpr int kMost = kMostSums / P;
  const int64_t bytes = panel_bytes(s.product), tiles = (s.rows + kMost - 1) / kMost;
  const uint8_t* w[P];
  for (int p = 0; p < P; ++p) w[p] = s.product.w + (panel + p) * bytes;
  const int64_t left = s.product.columns / 16 - panel - P;
  Next next{read_within(w[0] + P * bytes, (left < P ? left : P) * bytes, tiles * s.product.words), {}};
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const int64_t first = s.rows * tile / tiles, last = s.rows * (tile + 1) / tiles;
    bound_some<P, kMost>(s, first, last - first, panel, w, next, lows);
  }
}

}  // namespace

void screen_rows(const QuantizeArgs& a, int64_t begin, int64_t end, float* error_weights, float* length_weights) {
  for (int64_t row = begin; row < end; ++row) {
    switch (a.dtype) {
      case DType::kFloat32:
        weigh<Float32>(a, row, error_weights[row], length_weights[row]);
        break;
      case DType::kBFloat16:
        weigh<BFloat16>(a, row, error_weights[row], length_weights[row]);
        break;
      case DType::kFloat16:
        weigh<Float16>(a, row, error_weights[row], length_weights[row]);
        break;
    }
  }
}

void screen(const ScreenArgs& s, int64_t begin, int64_t end, float* least, float* scratch) {
  Vec* lows = reinterpret_cast<Vec*>(scratch);
  for (int64_t row = 0; row < s.rows; ++row) lows[row] = splat(-kInfinity);
  int64_t panel = begin;
  if (s.rows > kMostSums) {
    for (; panel + kMostPanels <= end; panel += kMostPanels) bound_panels<kMostPanels>(s, panel, lows);
  }
  for (; panel < end; ++panel) bound_panels<1>(s, panel, lows);
  for (int64_t row = 0; row < s.rows; ++row) least[row] = maximum_of(lows[row]);
}

void screened(const ScreenArgs& s, int64_t begin, int64_t end, const float* wanted, uint16_t* masks) {
  const int64_t panels = s.product.columns / 16;
  for (int64_t block = begin; block < end; ++block) {
    const int64_t left = panels - block * 16;
    const uint32_t inside = left < 16 ? (1u << left) - 1 : 0xffffu;
    for (int64_t row = 0; row < s.rows; ++row) {
      const int64_t at = block * s.rows + row;
      const Vec tops = load_as<Vec>(s.tops + at * 16);
      uint32_t found = 0;
#if defined(__AVX512F__)
      found = _mm512_cmp_ps_mask(reinterpret_cast<__m512>(tops), _mm512_set1_ps(wanted[row]), _CMP_GE_OQ);
#else
      for (int i = 0; i < kLanes; ++i) found |= (tops[i] >= wanted[row] ? 1u : 0u) << i;
#endif
      masks[at] = static_cast<uint16_t>(found & inside);
    }
  }
}

}  // namespace pyruntime::PYRUNTIME_ISA
