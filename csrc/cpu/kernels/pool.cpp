// Hidden rows of one sequence to one vector: last, first, given or mean row in float32, cut to its width, L2
// normalised.
#include "vec.h"

namespace pyruntime::PYRUNTIME_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kWide = 16;
#else
constexpr int kWide = 4;
#endif

// A plain float32 sum of 70,000 rows of one sign is wrong in its fourth digit. Rows are added in groups of so many,
// counted from the sequence's first, and the groups by compensated (Kahan) summation.
constexpr int64_t kGroup = 16;

struct Sum {
  void add(Vec group) {
    const Vec corrected = group - lost, next = total + corrected;
    lost = (next - total) - corrected;
    lost = lost == lost ? lost : Vec{};  // inf - inf: an infinite sum stays one
    total = next;
  }
  Vec total{}, lost{};
};

// N whole vectors of columns over `count` rows, in order, so a sum has one order whatever lies beside it.
template <class T, int N>
PYRUNTIME_INLINE void add_rows(const typename T::Element* p, int64_t row_stride, int64_t count, float* out) {
  using Part = std::conditional_t<sizeof(typename T::Element) == 4, Vec, HalfWords>;
  Sum sums[N];
  for (int64_t begin = 0; begin < count; begin += kGroup) {
    const int64_t rows = count - begin < kGroup ? count - begin : kGroup;
    Vec group[N] = {};
    for (int64_t row = 0; row < rows; ++row, p += row_stride) {
#pragma GCC unroll 16
      for (int i = 0; i < N; ++i) group[i] += widen(load_as<Part>(p + i * kLanes), T{});
    }
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) sums[i].add(group[i]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) {
    const Vec value = sums[i].total / static_cast<float>(count);
    memcpy(out + i * kLanes, &value, sizeof(value));
  }
}

template <class T>
void add_rest(const typename T::Element* p, int64_t row_stride, int64_t count, int64_t wide, float* out) {
  using Part = std::conditional_t<sizeof(typename T::Element) == 4, Vec, HalfWords>;
  Sum sum;
  for (int64_t begin = 0; begin < count; begin += kGroup) {
    const int64_t rows = count - begin < kGroup ? count - begin : kGroup;
    Vec group{};
    for (int64_t row = 0; row < rows; ++row, p += row_stride) {
      group += widen(load_first<Part>(p, wide, sizeof(typename T::Element)), T{});
    }
    sum.add(group);
  }
  store_narrow<Float32>(out, sum.total / static_cast<float>(count), wide);
}

template <class T>
void pool_columns(const PoolArgs& a, int64_t sequence, int64_t column, int64_t end) {
  int64_t first = a.starts[sequence], last = a.starts[sequence + 1];
  if (a.kinds[sequence] == 0) first = last - 1;
  if (a.kinds[sequence] == 1) last = first + 1;
  if (a.kinds[sequence] == 3) first = a.rows[sequence], last = first + 1;
  const auto* p = static_cast<const typename T::Element*>(a.hidden) + first * a.row_stride;
  float* out = a.out + sequence * a.width;
  const int64_t count = last - first;
  for (; column + kWide * kLanes <= end; column += kWide * kLanes) {
    add_rows<T, kWide>(p + column, a.row_stride, count, out + column);
  }
  for (; column + 4 * kLanes <= end; column += 4 * kLanes) {
    add_rows<T, 4>(p + column, a.row_stride, count, out + column);
  }
  for (; column + kLanes <= end; column += kLanes) add_rows<T, 1>(p + column, a.row_stride, count, out + column);
  if (column < end) add_rest<T>(p + column, a.row_stride, count, end - column, out + column);
}

}  // namespace

void pool(const PoolArgs& a, int64_t sequence, int64_t begin, int64_t end) {
  const int64_t width = a.dimensions[sequence], cut = end < width ? end : width;
  if (end > width) {
    const int64_t zeros = begin > width ? begin : width;
    memset(a.out + sequence * a.width + zeros, 0, static_cast<size_t>(end - zeros) * sizeof(float));
  }
  switch (a.dtype) {
    case DType::kFloat32:
      return pool_columns<Float32>(a, sequence, begin, cut);
    case DType::kBFloat16:
      return pool_columns<BFloat16>(a, sequence, begin, cut);
    case DType::kFloat16:
      return pool_columns<Float16>(a, sequence, begin, cut);
  }
}

void normalize(const PoolArgs& a, int64_t sequence) {
  if (!a.normalize[sequence]) return;
  const int64_t width = a.dimensions[sequence];
  float* out = a.out + sequence * a.width;
  // In double: the square of 1e20 is beyond float32, that of 1e-20 lost in it.
  typedef double Doubles __attribute__((vector_size(128)));
  Doubles squares{};
  for (int64_t i = 0; i < width; i += kLanes) {
    const Vec v = width - i < kLanes ? load_first<Vec>(out + i, width - i, sizeof(float)) : load_as<Vec>(out + i);
    const Doubles wide = __builtin_convertvector(v, Doubles);
    squares += wide * wide;
  }
  double sum = 0;
  for (int64_t i = 0; i < kLanes; ++i) sum += squares[i];
  const double norm = __builtin_sqrt(sum), factor = 1.0 / (norm < 1e-12 ? 1e-12 : norm);
  for (int64_t i = 0; i < width; ++i) out[i] = static_cast<float>(out[i] * factor);
}

}  // namespace pyruntime::PYRUNTIME_ISA
