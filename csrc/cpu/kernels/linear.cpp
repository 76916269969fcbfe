// The linear for few rows: every weight row is read once, whatever the number of rows; x stays in the cache.
#include "dot.h"

namespace pyruntime::PYRUNTIME_ISA {
namespace {

// Logits of rows [row, row + R) against columns [column, column + 16) into out[r * 16 + c].
template <class T, int R>
PYRUNTIME_INLINE void block(const LinearArgs& a, int64_t row, const typename T::Element* const* w, float* out) {
  using Element = typename T::Element;
  constexpr int C = 16 / R;
  const Element* x[R];
  for (int r = 0; r < R; ++r) x[r] = static_cast<const Element*>(a.x) + (row + r) * a.x_row;
  for (int c = 0; c < 16; c += C) {
    Vec products = dots<T, R, C>(x, w + c, a.depth);
    for (int r = 0; r < R; ++r) memcpy(out + r * 16 + c, reinterpret_cast<const float*>(&products) + r * C, C * 4);
  }
}

template <class T, int R>
PYRUNTIME_INLINE void finish(const LinearArgs& a, int64_t row, int64_t column, int64_t count,
                             const typename T::Element* const* w) {
  using Element = typename T::Element;
  float out[R * 16];
  block<T, R>(a, row, w, out);
  Vec bias{};
  if (a.bias != nullptr) bias = load_first<Vec>(a.bias + column, count, sizeof(float));
  for (int r = 0; r < R; ++r) {
    Vec y = load_as<Vec>(out + r * 16) + bias;
    store_narrow<T>(static_cast<Element*>(a.out) + (row + r) * a.out_row + column, y, count);
  }
}

template <class T>
void run(const LinearArgs& a, int64_t begin, int64_t end) {
  using Element = typename T::Element;
  for (int64_t column = begin; column < end; column += 16) {
    const int64_t count = end - column < 16 ? end - column : 16;
    const Element* w[16];
    // Past the end the last column is taken again and its result dropped.
    for (int64_t c = 0; c < 16; ++c) {
      w[c] = static_cast<const Element*>(a.w) + (column + (c < count ? c : count - 1)) * a.w_row;
    }
    int64_t row = 0;
    for (; row + 4 <= a.rows; row += 4) finish<T, 4>(a, row, column, count, w);
    for (; row + 2 <= a.rows; row += 2) finish<T, 2>(a, row, column, count, w);
    for (; row < a.rows; ++row) finish<T, 1>(a, row, column, count, w);
  }
}

}  // namespace

void linear(const LinearArgs& a, int64_t begin, int64_t end) {
  switch (a.dtype) {
    case DType::kFloat32:
      return run<Float32>(a, begin, end);
    case DType::kBFloat16:
      return run<BFloat16>(a, begin, end);
    case DType::kFloat16:
      return run<Float16>(a, begin, end);
  }
}

}  // namespace pyruntime::PYRUNTIME_ISA
