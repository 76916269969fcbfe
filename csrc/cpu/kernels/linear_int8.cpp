// The linear for few rows over int8 weights, one scale a column: weights become float32 in registers (exactly),
// products and sums are float32, each weight is read once.
#include "vec.h"

namespace pyruntime::PYRUNTIME_ISA {
namespace {

typedef int8_t Bytes __attribute__((vector_size(16)));
typedef int16_t ShortVec __attribute__((vector_size(32)));

template <class T>
PYRUNTIME_INLINE Vec load_x(const typename T::Element* p, int64_t count) {
  using Part = std::conditional_t<sizeof(typename T::Element) == 4, Vec, HalfWords>;
  if (count >= kLanes) return widen(load_as<Part>(p), T{});
  return widen(load_first<Part>(p, count, sizeof(typename T::Element)), T{});
}

PYRUNTIME_INLINE Vec load_w(const int8_t* p, int64_t count) {
  const Bytes bytes = count >= kLanes ? load_as<Bytes>(p) : load_first<Bytes>(p, count, 1);
#if defined(__AVX512F__)
  const __m512i words = _mm512_maskz_cvtepi8_epi32(static_cast<__mmask16>(-1), reinterpret_cast<__m128i>(bytes));
  return __builtin_convertvector(reinterpret_cast<IntVec>(words), Vec);
#else
  // In two steps: the compiler takes the direct conversion apart into single bytes.
  const ShortVec shorts = __builtin_convertvector(bytes, ShortVec);
  return __builtin_convertvector(__builtin_convertvector(shorts, IntVec), Vec);
#endif
}

template <class T, int R>
PYRUNTIME_INLINE void add_products(const typename T::Element* const* x, const int8_t* const* w, int64_t d,
                                   int64_t count, Vec (&sums)[16]) {
  constexpr int C = 16 / R;
  Vec rows[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) rows[r] = load_x<T>(x[r] + d, count);
#pragma GCC unroll 16
  for (int c = 0; c < C; ++c) {
    const Vec weights = load_w(w[c] + d, count);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) sums[r * C + c] = rows[r] * weights + sums[r * C + c];
  }
}

// One row against sixteen columns in turn: memory is read in one run.
template <class T>
PYRUNTIME_INLINE void stream_products(const typename T::Element* x, const int8_t* const* w, int64_t depth,
                                      Vec (&sums)[16]) {
#pragma GCC unroll 1
  for (int c = 0; c < 16; ++c) {
    Vec sum{};
    int64_t d = 0;
    for (; d + kLanes <= depth; d += kLanes) {
      if (d % 64 == 0) __builtin_prefetch(w[c] + d + 4096);
      sum = load_x<T>(x + d, kLanes) * load_w(w[c] + d, kLanes) + sum;
    }
    if (d < depth) sum = load_x<T>(x + d, depth - d) * load_w(w[c] + d, depth - d) + sum;
    sums[c] = sum;
  }
}

// R rows against 16 / R columns from `column` on; results past `columns` are dropped.
template <class T, int R>
PYRUNTIME_INLINE void block(const QuantizedArgs& a, int64_t row, int64_t column, int64_t columns,
                            const int8_t* const* w) {
  using Element = typename T::Element;
  constexpr int64_t C = 16 / R;
  const LinearArgs& l = a.linear;
  const Element* x[R];
  for (int r = 0; r < R; ++r) x[r] = static_cast<const Element*>(l.x) + (row + r) * l.x_row;
  Vec sums[16] = {};
  if constexpr (R == 1) {
    stream_products<T>(x[0], w, l.depth, sums);
  } else {
    int64_t d = 0;
    for (; d + kLanes <= l.depth; d += kLanes) add_products<T, R>(x, w, d, kLanes, sums);
    if (d < l.depth) add_products<T, R>(x, w, d, l.depth - d, sums);
  }
  const Vec products = sum_lanes(sums);
  const int64_t count = columns < C ? columns : C;
  for (int r = 0; r < R; ++r) {
    const float* own = reinterpret_cast<const float*>(&products) + r * C;
    const Vec scales = load_first<Vec>(a.scales + column, count, sizeof(float));
    Vec bias{};
    if (l.bias != nullptr) bias = load_first<Vec>(l.bias + column, count, sizeof(float));
    const Vec y = load_first<Vec>(own, C, sizeof(float)) * scales + bias;
    store_narrow<T>(static_cast<Element*>(l.out) + (row + r) * l.out_row + column, y, count);
  }
}

template <class T>
void run(const QuantizedArgs& a, int64_t begin, int64_t end) {
  const LinearArgs& l = a.linear;
  for (int64_t column = begin; column < end; column += 16) {
    const int8_t* w[16];
    // Past the end the last column is taken again and its result dropped.
    for (int64_t c = 0; c < 16; ++c) {
      w[c] = static_cast<const int8_t*>(l.w) + (column + c < end ? column + c : end - 1) * l.w_row;
    }
    int64_t row = 0;
    for (; row + 4 <= l.rows; row += 4) {
      for (int64_t c = column; c < end && c < column + 16; c += 4) block<T, 4>(a, row, c, end - c, w + (c - column));
    }
    for (; row < l.rows; ++row) block<T, 1>(a, row, column, end - column, w);
  }
}

}  // namespace

void linear_int8(const QuantizedArgs& a, int64_t begin, int64_t end) {
  switch (a.linear.dtype) {
    case DType::kFloat32:
      return run<Float32>(a, begin, end);
    case DType::kBFloat16:
      return run<BFloat16>(a, begin, end);
    case DType::kFloat16:
      return run<Float16>(a, begin, end);
  }
}

}  // namespace pyruntime::PYRUNTIME_ISA
