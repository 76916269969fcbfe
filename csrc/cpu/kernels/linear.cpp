// The linear for few rows: every weight row is read once, whatever the number of rows; x stays in the cache.
#include "dot.h"

namespace pyruntime::PYRUNTIME_ISA {
namespace {

template <class T, int R>
PYRUNTIME_INLINE void finish(const LinearArgs& a, int64_t row, int64_t column, int64_t count,
                             const typename T::Element* const* w) {
  using Element = typename T::Element;
  float out[R * 16];
  row_products<T, R>(a, row, w, out);
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
    point_at_columns<T>(a, column, end, w);
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
