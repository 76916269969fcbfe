// Rows normalised: by their root mean square, or by mean and variance after something has been added. In float32,
// rounded once.
#include "vec.h"

namespace pyruntime::PYRUNTIME_ISA {
namespace {

template <class T>
PYRUNTIME_INLINE Vec load_row(const void* p, int64_t at, int64_t width) {
  using Element = typename T::Element;
  using Part = std::conditional_t<sizeof(Element) == 4, Vec, HalfWords>;
  const Element* from = static_cast<const Element*>(p) + at;
  if (width - at >= kLanes) return widen(load_as<Part>(from), T{});
  return widen(load_first<Part>(from, width - at, sizeof(Element)), T{});
}

template <class T>
PYRUNTIME_INLINE const void* row_of(const void* p, int64_t row, int64_t stride) {
  return static_cast<const typename T::Element*>(p) + row * stride;
}

template <class T>
PYRUNTIME_INLINE float squares_of(const NormArgs& a, const void* x) {
  Vec even{}, odd{};
  int64_t i = 0;
  for (; i + 2 * kLanes <= a.width; i += 2 * kLanes) {
    const Vec v = load_row<T>(x, i, a.width), w = load_row<T>(x, i + kLanes, a.width);
    even += v * v, odd += w * w;
  }
  for (; i < a.width; i += kLanes) {
    const Vec v = load_row<T>(x, i, a.width);
    even += v * v;
  }
  return sum_of(even + odd);
}

// Without a weight the row stays as it is; what is added to it comes after.
template <class T>
void root_mean_square(const NormArgs& a, int64_t row) {
  const void* x = row_of<T>(a.x, row, a.x_row);
  const void* other = a.residual == nullptr ? nullptr : row_of<T>(a.residual, row, a.residual_row);
  auto* out = static_cast<typename T::Element*>(a.out) + row * a.out_row;
  Vec factor = splat(1.0f);
  if (a.weight != nullptr) {
    factor = splat(1.0f / __builtin_sqrtf(squares_of<T>(a, x) / static_cast<float>(a.width) + a.epsilon));
  }
  for (int64_t i = 0; i < a.width; i += kLanes) {
    Vec y = load_row<T>(x, i, a.width);
    if (a.weight != nullptr) y = y * factor * (load_row<T>(a.weight, i, a.width) + a.weight_offset);
    if (other != nullptr) y += load_row<T>(other, i, a.width);
    store_narrow<T>(out + i, y, a.width - i);
  }
}

template <class T>
PYRUNTIME_INLINE Vec added(const NormArgs& a, const void* x, const void* other, int64_t i) {
  const Vec v = load_row<T>(x, i, a.width);
  return a.residual == nullptr ? v : v + load_row<T>(other, i, a.width);
}

// Vectors of a row that are kept between the passes over it.
constexpr int64_t kKept = 64;

template <class T, bool Kept>
void centre(const NormArgs& a, int64_t row) {
  const void* x = row_of<T>(a.x, row, a.x_row);
  const void* other = a.residual == nullptr ? nullptr : row_of<T>(a.residual, row, a.residual_row);
  auto* out = static_cast<typename T::Element*>(a.out) + row * a.out_row;
  const int64_t vectors = (a.width + kLanes - 1) / kLanes, whole = a.width / kLanes;
  Vec kept[Kept ? kKept : 1];
  const auto read = [&](int64_t i) {
    const Vec v = added<T>(a, x, other, i * kLanes);
    if constexpr (Kept) kept[i] = v;
    return v;
  };
  const auto value = [&](int64_t i) { return Kept ? kept[i] : added<T>(a, x, other, i * kLanes); };
  // Here and below even and odd vectors apart, which do not wait for each other then.
  Vec total{}, odd_total{};
  int64_t i = 0;
  for (; i + 2 <= vectors; i += 2) total += read(i), odd_total += read(i + 1);
  if (i < vectors) total += read(i);
  const float count = static_cast<float>(a.width);
  const float mean = sum_of(total + odd_total) / count;
  // A second pass over the row: the difference of two large sums would lose what is asked for. What the deviations do
  // not sum to zero by is how far the mean was off.
  Vec rest{}, odd_rest{}, squares{}, odd_squares{};
  for (i = 0; i + 2 <= whole; i += 2) {
    const Vec even = value(i) - mean, odd = value(i + 1) - mean;
    rest += even, odd_rest += odd;
    squares += even * even, odd_squares += odd * odd;
  }
  for (; i < vectors; ++i) {
    const IntVec lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const int64_t left = a.width - i * kLanes;
    const Vec v = lane < static_cast<int32_t>(left < kLanes ? left : kLanes) ? value(i) - mean : Vec{};
    rest += v, squares += v * v;
  }
  const float off = sum_of(rest + odd_rest) / count;
  const float variance = sum_of(squares + odd_squares) / count - off * off;
  const Vec factor = splat(1.0f / __builtin_sqrtf((variance > 0.0f ? variance : 0.0f) + a.epsilon));
  for (i = 0; i < vectors; ++i) {
    const int64_t at = i * kLanes;
    const Vec weight = a.weight == nullptr ? splat(1.0f) : load_row<T>(a.weight, at, a.width);
    const Vec bias = a.bias == nullptr ? Vec{} : load_row<T>(a.bias, at, a.width);
    store_narrow<T>(out + at, (value(i) - mean - off) * factor * weight + bias, a.width - at);
  }
}

template <class T>
void mean_and_variance(const NormArgs& a, int64_t row) {
  if (a.width <= kKept * kLanes) return centre<T, true>(a, row);
  centre<T, false>(a, row);
}

template <class T>
void normalize_as(const NormArgs& a, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    if (a.centred) {
      mean_and_variance<T>(a, row);
    } else {
      root_mean_square<T>(a, row);
    }
  }
}

// One head of one token: its first half is turned against its second by the token's angles.
template <class T>
void rotate_head(const RotateArgs& a, const void* x, const void* cos, const void* sin, typename T::Element* out) {
  const int64_t half = a.width / 2;
  for (int64_t i = 0; i < half; i += kLanes) {
    const Vec first = load_row<T>(x, i, half), second = load_row<T>(x, half + i, a.width);
    const Vec low = first * load_row<T>(cos, i, half) - second * load_row<T>(sin, i, half);
    const Vec high = second * load_row<T>(cos, half + i, a.width) + first * load_row<T>(sin, half + i, a.width);
    store_narrow<T>(out + i, low, half - i);
    store_narrow<T>(out + half + i, high, half - i);
  }
}

template <class T>
void rotate_as(const RotateArgs& a, int64_t begin, int64_t end) {
  using Element = typename T::Element;
  for (int64_t token = begin; token < end; ++token) {
    const void* cos = row_of<T>(a.cos, token, a.angle_row);
    const void* sin = row_of<T>(a.sin, token, a.angle_row);
    for (int64_t head = 0; head < a.heads; ++head) {
      const Element* x = static_cast<const Element*>(a.x) + token * a.x_row + head * a.x_head;
      rotate_head<T>(a, x, cos, sin, static_cast<Element*>(a.out) + (token * a.heads + head) * a.width);
    }
  }
}

}  // namespace

void normalize_rows(const NormArgs& a, int64_t begin, int64_t end) {
  switch (a.dtype) {
    case DType::kFloat32:
      return normalize_as<Float32>(a, begin, end);
    case DType::kBFloat16:
      return normalize_as<BFloat16>(a, begin, end);
    case DType::kFloat16:
      return normalize_as<Float16>(a, begin, end);
  }
}

void rotate(const RotateArgs& a, int64_t begin, int64_t end) {
  switch (a.dtype) {
    case DType::kFloat32:
      return rotate_as<Float32>(a, begin, end);
    case DType::kBFloat16:
      return rotate_as<BFloat16>(a, begin, end);
    case DType::kFloat16:
      return rotate_as<Float16>(a, begin, end);
  }
}

}  // namespace pyruntime::PYRUNTIME_ISA
