// Sparse embeddings: over the vocabulary (SPLADE) by tiles, and over a text's own token ids (lexical weights).
#pragma once

#include "product.cuh"
#include "scan.cuh"

namespace pyruntime::cuda {

// Grid: (sequences, tiles of columns). out [sequences, columns]: log(1 + relu(largest logit over the sequence's rows)).
// An empty sequence answers zeros.
template <class T, int Rows>
__global__ void __launch_bounds__(kProductThreads)
    pool_sparse_kernel(const ProductArguments<T> a, const int32_t* __restrict__ starts, float* __restrict__ out) {
  constexpr int kSlices = kProductThreads / kTileColumns;
  __shared__ ProductTile<Rows> tile;
  __shared__ float tops[kProductThreads];
  int64_t begin, end;
  bounds_of(starts, blockIdx.x, a.rows, begin, end);
  const int thread = static_cast<int>(threadIdx.x), column = thread % kTileColumns, slice = thread / kTileColumns;
  const int64_t first_column = int64_t{blockIdx.y} * kTileColumns;
  float top = -infinity();
  for (int64_t first = begin; first < end; first += Rows) {
    product_tile<T, Rows>(a, first, end, first_column, tile);
    // The next tile's logits are written behind the barriers of its product, after these reads.
    for (int r = slice; r < Rows && first + r < end; r += kSlices) {
      top = larger(top, tile.logits[r * kTileStride + column]);
    }
  }
  tops[thread] = top;
  __syncthreads();
  if (slice != 0 || first_column + column >= a.columns) return;
  for (int s = 1; s < kSlices; ++s) top = larger(top, tops[s * kTileColumns + column]);
  top += bias_at(a, first_column + column);
  out[int64_t{blockIdx.x} * a.columns + first_column + column] = top <= 0.0f ? 0.0f : log1pf(top);
}

struct LexicalArguments {
  const int32_t* starts;     // [sequences + 1]
  const int64_t* token_ids;  // [rows]
  const int64_t* skip;       // [skipped] special ids
  int64_t rows, width, row_stride, skipped, sequences;
  float bias;
};

// Grid: warps over rows. weights[row] = relu(hidden[row]·weight + bias), 0 for special ids.
template <class T>
__global__ void __launch_bounds__(kScanThreads)
    lexical_dot_kernel(const T* __restrict__ hidden, const T* __restrict__ weight, const LexicalArguments a,
                       float* __restrict__ weights) {
  const int64_t row = int64_t{blockIdx.x} * (kScanThreads / kWarp) + threadIdx.x / kWarp;
  if (row >= a.rows) return;
  const float y = warp_dot(hidden + row * a.row_stride, weight, a.width) + a.bias;
  bool special = false;
  for (int64_t i = threadIdx.x % kWarp; i < a.skipped; i += kWarp) special |= a.skip[i] == a.token_ids[row];
  special = __any_sync(kAllLanes, special) != 0;
  if (threadIdx.x % kWarp == 0) weights[row] = special || y <= 0.0f ? 0.0f : y;
}

// Grid: one block a sequence; quadratic in its length. best[row]: the largest weight of the row's id in its sequence
// where the row is the first of that id, else 0. counts[sequence]: rows with a best.
static __global__ void __launch_bounds__(kScanThreads)
    lexical_best_kernel(const LexicalArguments a, const float* __restrict__ weights, float* __restrict__ best,
                        int32_t* __restrict__ counts) {
  __shared__ int32_t scratch[kScanThreads / kWarp];
  int64_t begin, end;
  bounds_of(a.starts, blockIdx.x, a.rows, begin, end);
  int32_t own = 0;
  for (int64_t i = begin + threadIdx.x; i < end; i += kScanThreads) {
    const int64_t id = a.token_ids[i];
    float top = weights[i];
    bool first = true;
    for (int64_t j = begin; j < end; ++j) {
      if (a.token_ids[j] != id) continue;
      first = first && j >= i;
      top = larger(top, weights[j]);
    }
    best[i] = first ? top : 0.0f;
    own += best[i] != 0.0f ? 1 : 0;
  }
  const int32_t total = block_sum(own, scratch);
  if (threadIdx.x == 0) counts[blockIdx.x] = total;
}

// Grid: one block a sequence. Writes the (id, weight) pairs of a sequence from out_starts on, by ascending id: a row's
// place is the number of smaller ids that have a pair.
static __global__ void __launch_bounds__(kScanThreads)
    lexical_write_kernel(const LexicalArguments a, const float* __restrict__ best,
                         const int32_t* __restrict__ out_starts, int64_t* __restrict__ ids, float* __restrict__ out) {
  int64_t begin, end;
  bounds_of(a.starts, blockIdx.x, a.rows, begin, end);
  for (int64_t i = begin + threadIdx.x; i < end; i += kScanThreads) {
    if (best[i] == 0.0f) continue;
    int64_t place = out_starts[blockIdx.x];
    for (int64_t j = begin; j < end; ++j) place += best[j] != 0.0f && a.token_ids[j] < a.token_ids[i] ? 1 : 0;
    // Starts that overlap could ask for more places than there are.
    if (place >= a.rows) continue;
    ids[place] = a.token_ids[i];
    out[place] = best[i];
  }
}

}  // namespace pyruntime::cuda
