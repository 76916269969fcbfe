// Hidden rows of packed sequences to one vector each: last, first or mean row in float32, cut, L2 normalised.
#pragma once

#include "primitives.cuh"

namespace pyruntime::cuda {

constexpr int kPoolThreads = 256;

// Grid: one block a sequence. hidden [T, width] with `row_stride` elements between rows; out [S, width] dense.
// A sequence that no check on the host could see (an empty one, an unknown kind, a width outside the row) answers NaN.
template <class T>
__global__ void __launch_bounds__(kPoolThreads)
    pool_kernel(const T* __restrict__ hidden, int64_t row_stride, int64_t width, int64_t rows,
                const int32_t* __restrict__ starts, const int32_t* __restrict__ kinds,
                const int32_t* __restrict__ dimensions, const bool* __restrict__ normalize, float* __restrict__ out) {
  __shared__ float shared[kPoolThreads / kWarp];
  const int64_t sequence = blockIdx.x;
  const int64_t begin = starts[sequence], end = starts[sequence + 1], kept = dimensions[sequence];
  const int32_t kind = kinds[sequence];
  float* target = out + sequence * width;
  const bool valid = 0 <= begin && begin < end && end <= rows && 0 <= kind && kind <= 2 && 1 <= kept && kept <= width;
  if (!valid) {
    for (int64_t c = threadIdx.x; c < width; c += blockDim.x) target[c] = __int_as_float(0x7fc00000);
    return;
  }
  const int64_t first = kind == 0 ? end - 1 : begin, last = kind == 1 ? begin + 1 : end;
  const float share = 1.0f / static_cast<float>(last - first);
  float squares = 0.0f;
  for (int64_t c = threadIdx.x; c < width; c += blockDim.x) {
    float sum = 0.0f;
    if (c < kept) {
      for (int64_t row = first; row < last; ++row) sum += widen(hidden[row * row_stride + c]);
    }
    const float value = sum * share;
    squares += value * value;
    target[c] = value;
  }
  if (!normalize[sequence]) return;
  const float norm = sqrtf(block_sum(squares, shared));
  const float factor = 1.0f / (norm < 1e-12f ? 1e-12f : norm);
  for (int64_t c = threadIdx.x; c < kept; c += blockDim.x) target[c] *= factor;
}

}  // namespace pyruntime::cuda
