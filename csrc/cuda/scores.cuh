// Scores over the vocabulary: the logits of chosen labels alone, and log-sum-exp by tiles, never a [rows, columns]
// matrix.
#pragma once

#include "product.cuh"

namespace pyruntime::cuda {

constexpr int kLabelThreads = 512;

struct LabelArguments {
  const int64_t* ids;     // [count]
  const int32_t* starts;  // [rows + 1]; null: row r has the one label ids[r]
  int64_t count;
  float* out;  // [count]
};

__device__ __forceinline__ void labels_of(const LabelArguments& l, int64_t row, int64_t& begin, int64_t& end) {
  begin = l.starts == nullptr ? row : l.starts[row];
  end = l.starts == nullptr ? row + 1 : l.starts[row + 1];
  if (begin < 0) begin = 0;
  if (end > l.count) end = l.count;
}

// The plain logit of one label, by a warp; NaN for a label outside the matrix.
template <class T>
__device__ __forceinline__ float label_logit(const ProductArguments<T>& a, int64_t row, int64_t label) {
  if (label < 0 || label >= a.columns) return not_a_number();
  return warp_dot(a.x + row * a.x_row, a.w + label * a.w_row, a.depth) + bias_at(a, label);
}

// Grid: one block a row. Without `temperature` the plain logits; with it the softmax of logit / temperature over the
// row's labels. The largest logit is taken off before the division, which overflows at tiny temperatures otherwise.
template <class T>
__global__ void __launch_bounds__(kLabelThreads)
    label_kernel(const ProductArguments<T> a, const LabelArguments l, const float* __restrict__ temperature) {
  __shared__ float scratch[kLabelThreads / kWarp];
  const int64_t row = blockIdx.x;
  int64_t begin, end;
  labels_of(l, row, begin, end);
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const float t = temperature == nullptr ? 1.0f : temperature[row];
  for (int64_t i = begin + warp; i < end; i += kLabelThreads / kWarp) {
    float y = label_logit(a, row, l.ids[i]);
    if (temperature != nullptr) y = t > 0.0f && t < infinity() ? shape(a, y) : not_a_number();
    if (threadIdx.x % kWarp == 0) l.out[i] = y;
  }
  if (temperature == nullptr) return;
  __syncthreads();
  float top = -infinity();
  for (int64_t i = begin + threadIdx.x; i < end; i += kLabelThreads) top = larger(top, l.out[i]);
  top = block_max(top, scratch);
  float sum = 0.0f;
  for (int64_t i = begin + threadIdx.x; i < end; i += kLabelThreads) {
    // In double: neither the difference nor the quotient leaves its range.
    const float e = expf(static_cast<float>((static_cast<double>(l.out[i]) - static_cast<double>(top)) / t));
    l.out[i] = e;
    sum += e;
  }
  sum = block_sum(sum, scratch);
  for (int64_t i = begin + threadIdx.x; i < end; i += kLabelThreads) l.out[i] /= sum;
}

// Grid: (tiles of columns, tiles of rows). Of every row over this tile's columns, the largest shaped logit and the sum
// of exp(logit - largest): maxima and sums [tiles of columns, rows].
template <class T, int Rows>
__global__ void __launch_bounds__(kProductThreads)
    logsumexp_kernel(const ProductArguments<T> a, float* __restrict__ maxima, float* __restrict__ sums) {
  __shared__ ProductTile<Rows> tile;
  const int64_t first_column = int64_t{blockIdx.x} * kTileColumns, first_row = int64_t{blockIdx.y} * Rows;
  product_tile<T, Rows>(a, first_row, a.rows, first_column, tile);
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int r = static_cast<int>(threadIdx.x) / kWarp; r < Rows; r += kProductThreads / kWarp) {
    if (first_row + r >= a.rows) break;
    float y[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int64_t column = first_column + lane + j * kWarp;
      const float logit = tile.logits[r * kTileStride + lane + j * kWarp];
      y[j] = column < a.columns ? shape(a, logit + bias_at(a, column)) : -infinity();
    }
    const float top = warp_max(larger(y[0], y[1]));
    const float base = top == -infinity() ? 0.0f : top;  // keeps -inf - -inf out
    const float sum = warp_sum(expf(y[0] - base) + expf(y[1] - base));
    if (lane == 0) {
      maxima[int64_t{blockIdx.x} * a.rows + first_row + r] = top;
      sums[int64_t{blockIdx.x} * a.rows + first_row + r] = sum;
    }
  }
}

enum class Answer : int { kLogSumExp, kProbabilities, kLogprobs };

// Grid: one block a row. Combines the tiles of logsumexp_kernel in one fixed order; answers [rows] of log-sum-exp, or
// for the row's labels exp(logit - it) or logit - it.
template <class T>
__global__ void __launch_bounds__(kLabelThreads)
    combine_kernel(const ProductArguments<T> a, const LabelArguments l, const float* __restrict__ maxima,
                   const float* __restrict__ sums, int64_t tiles, Answer answer) {
  __shared__ float tops[kLabelThreads / kWarp];
  __shared__ double totals[kLabelThreads / kWarp];
  const int64_t row = blockIdx.x;
  float top = -infinity();
  for (int64_t t = threadIdx.x; t < tiles; t += kLabelThreads) top = larger(top, maxima[t * a.rows + row]);
  top = block_max(top, tops);
  double total = 0;
  if (top != -infinity()) {
    for (int64_t t = threadIdx.x; t < tiles; t += kLabelThreads) {
      total += static_cast<double>(sums[t * a.rows + row]) * static_cast<double>(expf(maxima[t * a.rows + row] - top));
    }
  }
  total = block_sum(total, totals);
  // The sum over the row is e^top * e^log_sum. Apart, they keep what one float32 loses beside a large maximum.
  const double log_sum = top == -infinity() ? 0.0 : log(total);
  if (answer == Answer::kLogSumExp) {
    if (threadIdx.x == 0) l.out[row] = static_cast<float>(static_cast<double>(top) + log_sum);
    return;
  }
  int64_t begin, end;
  labels_of(l, row, begin, end);
  for (int64_t i = begin + threadIdx.x / kWarp; i < end; i += kLabelThreads / kWarp) {
    const float above = shape(a, label_logit(a, row, l.ids[i])) - top;
    float y = static_cast<float>(static_cast<double>(above) - log_sum);
    y = y > 0.0f ? 0.0f : y;  // rounding alone can lift it above; NaN stays
    if (threadIdx.x % kWarp == 0) l.out[i] = answer == Answer::kProbabilities ? expf(y) : y;
  }
}

}  // namespace pyruntime::cuda
