// Scores over the vocabulary: log-sum-exp in tiles that never leave the cache, and the logits of chosen labels alone.
#include "dot.h"

namespace pyruntime::PYRUNTIME_ISA {
namespace {

// One group of 16 columns against R rows: each row's running maximum and sum take them in.
template <class T, int R>
PYRUNTIME_INLINE void fold_columns(const LogSumExpArgs& a, int64_t row, int64_t column, int64_t count,
                                   const typename T::Element* const* w, float* maxima, float* sums) {
  const LinearArgs& l = a.linear;
  float logits[R * 16];
  row_products<T, R>(l, row, w, logits);
  const IntVec lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  Vec bias{};
  if (l.bias != nullptr) bias = load_first<Vec>(l.bias + column, count, sizeof(float));
  for (int r = 0; r < R; ++r) {
    Vec y = (load_as<Vec>(logits + r * 16) + bias) * a.scale;
    if (a.softcap != 0.0f) y = hyperbolic_tangent(y * (1.0f / a.softcap)) * a.softcap;
    y = lane < static_cast<int32_t>(count) ? y : splat(-__builtin_huge_valf());
    const Vec before = load_as<Vec>(maxima + (row + r) * 16);
    const Vec sum = load_as<Vec>(sums + (row + r) * 16);
    // Sixteen running pairs a row, one a lane. The guard keeps exp(-inf - -inf) out.
    const Vec top = maximum_or_nan(y, before);
    const Vec safe = top == splat(-__builtin_huge_valf()) ? Vec{} : top;
    const Vec step = y - safe;
    Vec gained = exponential(step);
    gained = step != step ? step : gained;
    const Vec total = sum * exponential(before - safe) + gained;
    memcpy(maxima + (row + r) * 16, &top, sizeof(top));
    memcpy(sums + (row + r) * 16, &total, sizeof(total));
  }
}

template <class T>
void fold_range(const LogSumExpArgs& a, int64_t begin, int64_t end, float* maxima, float* sums) {
  using Element = typename T::Element;
  const LinearArgs& l = a.linear;
  for (int64_t column = begin; column < end; column += 16) {
    const int64_t count = end - column < 16 ? end - column : 16;
    const Element* w[16];
    point_at_columns<T>(l, column, end, w);
    int64_t row = 0;
    for (; row + 4 <= l.rows; row += 4) fold_columns<T, 4>(a, row, column, count, w, maxima, sums);
    for (; row + 2 <= l.rows; row += 2) fold_columns<T, 2>(a, row, column, count, w, maxima, sums);
    for (; row < l.rows; ++row) fold_columns<T, 1>(a, row, column, count, w, maxima, sums);
  }
}

template <class T>
void label_row(const LabelArgs& a, int64_t row) {
  using Element = typename T::Element;
  const LinearArgs& l = a.linear;
  const Element* x = static_cast<const Element*>(l.x) + row * l.x_row;
  const int64_t end = a.label_starts[row + 1];
  for (int64_t i = a.label_starts[row]; i < end; i += 16) {
    const int64_t count = end - i < 16 ? end - i : 16;
    const Element* w[16];
    Vec bias{};
    for (int64_t c = 0; c < 16; ++c) {
      const int64_t label = a.label_ids[i + (c < count ? c : 0)];
      w[c] = static_cast<const Element*>(l.w) + label * l.w_row;
      if (l.bias != nullptr) bias[c] = l.bias[label];
    }
    Vec y = dots<T, 1, 16>(&x, w, l.depth) + bias;
    store_narrow<Float32>(static_cast<float*>(l.out) + i, y, count);
  }
}

}  // namespace

// `maxima` and `sums` hold 16 partial pairs a row: [rows, 16].
void logsumexp(const LogSumExpArgs& a, int64_t begin, int64_t end, float* maxima, float* sums) {
  for (int64_t i = 0; i < a.linear.rows * 16; ++i) maxima[i] = -__builtin_huge_valf(), sums[i] = 0.0f;
  switch (a.linear.dtype) {
    case DType::kFloat32:
      return fold_range<Float32>(a, begin, end, maxima, sums);
    case DType::kBFloat16:
      return fold_range<BFloat16>(a, begin, end, maxima, sums);
    case DType::kFloat16:
      return fold_range<Float16>(a, begin, end, maxima, sums);
  }
}

void labels(const LabelArgs& a, int64_t row) {
  switch (a.linear.dtype) {
    case DType::kFloat32:
      return label_row<Float32>(a, row);
    case DType::kBFloat16:
      return label_row<BFloat16>(a, row);
    case DType::kFloat16:
      return label_row<Float16>(a, row);
  }
}

}  // namespace pyruntime::PYRUNTIME_ISA
