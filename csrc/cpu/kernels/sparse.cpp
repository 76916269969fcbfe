// SPLADE: of every vocabulary entry the largest logit over a sequence's tokens, as log(1 + relu(logit)). The logits of
// a group of sixteen entries live in registers; [T, V] never exists.
#include "dot.h"

namespace pyruntime::PYRUNTIME_ISA {
namespace {

// NaN wins, so that it reaches the answer.
template <class T, int R>
PYRUNTIME_INLINE Vec largest(const LinearArgs& a, int64_t row, const typename T::Element* const* w, Vec top) {
  float logits[R * 16];
  row_products<T, R>(a, row, w, logits);
  for (int r = 0; r < R; ++r) top = maximum_or_nan(load_as<Vec>(logits + r * 16), top);
  return top;
}

template <class T>
void run(const SparseArgs& a, int64_t begin, int64_t end) {
  const LinearArgs& l = a.linear;
  for (int64_t column = begin; column < end; column += 16) {
    const int64_t count = end - column < 16 ? end - column : 16;
    const typename T::Element* w[16];
    point_at_columns<T>(l, column, end, w);
    Vec bias{};
    if (l.bias != nullptr) bias = load_first<Vec>(l.bias + column, count, sizeof(float));
    for (int64_t sequence = 0; sequence < a.sequences; ++sequence) {
      int64_t row = a.starts[sequence];
      const int64_t last = a.starts[sequence + 1];
      Vec top = splat(-__builtin_huge_valf());
      for (; row + 4 <= last; row += 4) top = largest<T, 4>(l, row, w, top);
      for (; row < last; ++row) top = largest<T, 1>(l, row, w, top);
      top += bias;
      float* out = static_cast<float*>(l.out) + sequence * l.out_row + column;
      for (int64_t c = 0; c < count; ++c) out[c] = top[c] <= 0.0f ? 0.0f : __builtin_log1pf(top[c]);
    }
  }
}

}  // namespace

void sparse(const SparseArgs& a, int64_t begin, int64_t end) {
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
