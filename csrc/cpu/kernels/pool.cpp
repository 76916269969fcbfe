// Hidden rows of one sequence to one vector: last, first or mean row in float32, cut to its width, L2 normalised.
#include "vec.h"

namespace pyruntime::PYRUNTIME_ISA {
namespace {

template <class T>
void pool_one(const PoolArgs& a, int64_t sequence) {
  using Element = typename T::Element;
  using Part = std::conditional_t<sizeof(Element) == 4, Vec, HalfWords>;
  const int64_t begin = a.starts[sequence], end = a.starts[sequence + 1], width = a.dimensions[sequence];
  const Element* hidden = static_cast<const Element*>(a.hidden);
  float* out = a.out + sequence * a.width;
  int64_t first = begin, last = end;
  if (a.kinds[sequence] == 0) first = end - 1;
  if (a.kinds[sequence] == 1) last = begin + 1;
  const float share = 1.0f / static_cast<float>(last - first);
  Vec squares{};
  // Column by column group, rows in order: the sum of a sequence has one order, whatever lies beside it.
  for (int64_t column = 0; column < width; column += 4 * kLanes) {
    const int64_t wide = width - column < 4 * kLanes ? width - column : 4 * kLanes;
    Vec sums[4] = {};
    for (int64_t row = first; row < last; ++row) {
      const Element* p = hidden + row * a.row_stride + column;
      if (wide == 4 * kLanes) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) sums[i] += widen(load_as<Part>(p + i * kLanes), T{});
      } else {
        for (int64_t i = 0; i * kLanes < wide; ++i) {
          const int64_t count = wide - i * kLanes < kLanes ? wide - i * kLanes : kLanes;
          sums[i] += widen(load_first<Part>(p + i * kLanes, count, sizeof(Element)), T{});
        }
      }
    }
    for (int64_t i = 0; i * kLanes < wide; ++i) {
      const Vec value = sums[i] * share;
      squares += value * value;
      store_narrow<Float32>(out + column + i * kLanes, value, wide - i * kLanes);
    }
  }
  memset(out + width, 0, static_cast<size_t>(a.width - width) * sizeof(float));
  if (!a.normalize[sequence]) return;
  const float norm = __builtin_sqrtf(sum_of(squares));
  const float factor = 1.0f / (norm < 1e-12f ? 1e-12f : norm);
  for (int64_t column = 0; column < width; ++column) out[column] *= factor;
}

}  // namespace

void pool(const PoolArgs& a, int64_t sequence) {
  switch (a.dtype) {
    case DType::kFloat32:
      return pool_one<Float32>(a, sequence);
    case DType::kBFloat16:
      return pool_one<BFloat16>(a, sequence);
    case DType::kFloat16:
      return pool_one<Float16>(a, sequence);
  }
}

}  // namespace pyruntime::PYRUNTIME_ISA
