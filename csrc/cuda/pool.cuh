// Hidden rows of packed sequences to one vector each: last, first, mean (in float32) or a named row, cut, L2
// normalised.
#pragma once

#include "primitives.cuh"

namespace pyruntime::cuda {

constexpr int kPoolThreads = 512;

struct PoolArguments {
  int64_t row_stride, width, rows;  // hidden [rows, width], row_stride elements from row to row
  const int32_t* starts;            // [S + 1]
  const int32_t* kinds;             // [S]: 0 last, 1 first, 2 mean, 3 named row
  const int32_t* dimensions;        // [S], 1..width
  const bool* normalize;            // [S]
  const int64_t* named;             // [S] or null: the packed row of kind 3
  float* out;                       // [S, width] dense
};

// Rows [first, last) that make up the vector of a sequence. False: the arguments of that sequence are wrong.
__device__ __forceinline__ bool rows_of(const PoolArguments& a, int64_t sequence, int64_t& first, int64_t& last) {
  const int64_t begin = a.starts[sequence], end = a.starts[sequence + 1], kept = a.dimensions[sequence];
  const int32_t kind = a.kinds[sequence];
  if (!(0 <= begin && begin < end && end <= a.rows && 0 <= kind && kind <= 3 && 1 <= kept && kept <= a.width)) {
    return false;
  }
  first = kind == 0 ? end - 1 : begin;
  last = kind == 1 ? begin + 1 : end;
  if (kind == 3) {
    if (a.named == nullptr || a.named[sequence] < begin || a.named[sequence] >= end) return false;
    first = a.named[sequence];
    last = first + 1;
  }
  return true;
}

// Grid: one block a sequence. The block's threads form a grid of vectors of columns by every n-th row; the shape
// depends on width alone, so a sequence's answer does not depend on its neighbours. A sequence whose arguments are
// wrong (the host cannot see them) answers NaN.
template <class T>
__global__ void __launch_bounds__(kPoolThreads) pool_kernel(const T* __restrict__ hidden, const PoolArguments a) {
  constexpr int N = kVector<T>;
  __shared__ float partial[kPoolThreads * N];
  __shared__ double scratch[kPoolThreads / kWarp];
  const int64_t sequence = blockIdx.x;
  const int thread = static_cast<int>(threadIdx.x);
  float* target = a.out + sequence * a.width;
  int64_t first = 0, last = 0;
  if (!rows_of(a, sequence, first, last)) {
    for (int64_t c = thread; c < a.width; c += kPoolThreads) target[c] = not_a_number();
    return;
  }
  const int64_t kept = a.dimensions[sequence];
  const bool aligned = rows_aligned(hidden, a.row_stride);
  int across = 1;  // threads along the columns, a power of two
  while (across < kPoolThreads && across * N < a.width) across *= 2;
  const int down = kPoolThreads / across, column = thread % across, step = thread / across;
  const float share = 1.0f / static_cast<float>(last - first);
  double squares = 0.0;  // the squares of large float32 values are not float32 values
  for (int64_t begin = 0; begin < a.width; begin += int64_t{across} * N) {
    const int64_t c = begin + int64_t{column} * N;
    float sums[N] = {};
    if (c < kept) {
#pragma unroll 4
      for (int64_t row = first + step; row < last; row += down) {
        float x[N];
        load_vector(hidden + row * a.row_stride + c, kept - c, aligned, x);
#pragma unroll
        for (int i = 0; i < N; ++i) sums[i] += x[i];
      }
    }
#pragma unroll
    for (int i = 0; i < N; ++i) partial[i * kPoolThreads + thread] = sums[i];
    __syncthreads();
    for (int j = thread; j < across * N; j += kPoolThreads) {
      const int64_t at = begin + j;
      if (at >= a.width) break;
      float sum = 0.0f;
      for (int s = 0; s < down; ++s) sum += partial[j % N * kPoolThreads + s * across + j / N];
      const float value = sum * share;
      squares += static_cast<double>(value) * static_cast<double>(value);
      target[at] = value;
    }
    __syncthreads();
  }
  if (!a.normalize[sequence]) return;
  const double norm = sqrt(block_sum(squares, scratch));
  const double bound = norm < 1e-12 ? 1e-12 : norm;
  // block_sum's barriers order the writes of other threads before these reads.
  for (int64_t c = thread; c < kept; c += kPoolThreads) target[c] = static_cast<float>(target[c] / bound);
}

}  // namespace pyruntime::cuda
