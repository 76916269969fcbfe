// The linear for few rows: every weight row is read once, whatever the number of rows; x stays in the cache.
#include "activation.h"
#include "dot.h"

namespace pyruntime::PYRUNTIME_ISA {
namespace {

template <class T, int R>
PYRUNTIME_INLINE void finish(const LinearArgs& a, int64_t row, int64_t column, int64_t count,
                             const typename T::Element* const* w, Ahead& ahead) {
  using Element = typename T::Element;
  float out[R * 16];
  row_products<T, R>(a, row, w, out, ahead);
  Vec bias{};
  if (a.bias != nullptr) bias = load_first<Vec>(a.bias + column, count, sizeof(float));
  for (int r = 0; r < R; ++r) {
    Vec y = load_as<Vec>(out + r * 16) + bias;
    store_narrow<T>(static_cast<Element*>(a.out) + (row + r) * a.out_row + column, y, count);
  }
}

// The sixteen columns after `column`, to be read in equal shares while those from `column` on are multiplied: without,
// every pass over them but the first would leave the memory idle.
template <class T>
Ahead next_columns(const LinearArgs& a, int64_t column) {
  const int64_t size = sizeof(typename T::Element), bytes = a.w_row * size;
  const int64_t first = column + 16 < a.columns ? column + 16 : a.columns;
  const int64_t count = a.columns - first < 16 ? a.columns - first : 16;
  // Steps over the depth: four for four rows, two for two; one row alone reads ahead by itself.
  const int64_t steps = ((a.rows + 3) / 4 * 4) * ((a.depth + T::kStep - 1) / T::kStep);
  const char* w = static_cast<const char*>(a.w);
  return read_within(w + first * bytes, count * bytes, steps);
}

template <class T>
void run(const LinearArgs& a, int64_t begin, int64_t end) {
  using Element = typename T::Element;
  for (int64_t column = begin; column < end; column += 16) {
    const int64_t count = end - column < 16 ? end - column : 16;
    const Element* w[16];
    point_at_columns<T>(a, column, end, w);
    Ahead ahead = next_columns<T>(a, column);
    int64_t row = 0;
    for (; row + 4 <= a.rows; row += 4) finish<T, 4>(a, row, column, count, w, ahead);
    for (; row + 2 <= a.rows; row += 2) finish<T, 2>(a, row, column, count, w, ahead);
    for (; row < a.rows; ++row) finish<T, 1>(a, row, column, count, w, ahead);
  }
}

template <class T, Activation A>
void activate_rows(const ActivateArgs& a) {
  using Element = typename T::Element;
  using Part = std::conditional_t<sizeof(Element) == 4, Vec, HalfWords>;
  for (int64_t row = 0; row < a.rows; ++row) {
    Element* y = static_cast<Element*>(a.y) + row * a.y_row;
    const Element* up = static_cast<const Element*>(a.up) + (a.up == nullptr ? 0 : row * a.up_row);
    for (int64_t n = 0; n < a.columns; n += 16) {
      const int64_t count = a.columns - n < 16 ? a.columns - n : 16;
      Vec value = activate<A>(widen(load_first<Part>(y + n, count, sizeof(Element)), T{}));
      if (a.up != nullptr) value *= widen(load_first<Part>(up + n, count, sizeof(Element)), T{});
      store_narrow<T>(y + n, value, count);
    }
  }
}

template <class T>
void activate_as(const ActivateArgs& a) {
  with_activation(a.activation, [&](auto activation) { activate_rows<T, decltype(activation)::value>(a); });
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

void activate(const ActivateArgs& a) {
  switch (a.dtype) {
    case DType::kFloat32:
      return activate_as<Float32>(a);
    case DType::kBFloat16:
      return activate_as<BFloat16>(a);
    case DType::kFloat16:
      return activate_as<Float16>(a);
  }
}

}  // namespace pyruntime::PYRUNTIME_ISA
