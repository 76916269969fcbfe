// Products of rows with rows of the vocabulary's matrix: a tile of logits in shared memory, and single dots.
#pragma once

#include "primitives.cuh"

namespace pyruntime::cuda {

constexpr int kProductThreads = 256;
constexpr int kTileColumns = 64;
constexpr int kTileDepth = 32;
constexpr int kTileStride = kTileColumns + 1;  // odd: neither rows nor columns of a tile share a bank

enum class BiasType : int { kNone, kFloat32, kBFloat16, kFloat16 };

// logit = softcap(scale * (x[row]·w[column] + bias[column])).
template <class T>
struct ProductArguments {
  const T* x;  // [rows, depth], x_row elements from row to row
  const T* w;  // [columns, depth], w_row elements from row to row
  const void* bias;
  BiasType bias_type;
  int64_t x_row, w_row, rows, columns, depth;
  float softcap, scale;  // 0: no softcap
};

template <class T>
__device__ __forceinline__ float bias_at(const ProductArguments<T>& a, int64_t column) {
  switch (a.bias_type) {
    case BiasType::kFloat32:
      return static_cast<const float*>(a.bias)[column];
    case BiasType::kBFloat16:
      return widen(static_cast<const __nv_bfloat16*>(a.bias)[column]);
    case BiasType::kFloat16:
      return widen(static_cast<const __half*>(a.bias)[column]);
    default:
      return 0.0f;
  }
}

template <class T>
__device__ __forceinline__ float shape(const ProductArguments<T>& a, float logit) {
  logit *= a.scale;
  return a.softcap > 0.0f ? a.softcap * tanhf(logit / a.softcap) : logit;
}

// `count` rows of `source` from `first` on, depth [k, k + kTileDepth), transposed: to[depth][row]. Zeros outside.
template <class T, int Count, int Stride>
__device__ __forceinline__ void load_tile(const T* source, int64_t stride, int64_t first, int64_t rows, int64_t k,
                                          int64_t depth, bool aligned, float* to) {
  constexpr int N = kVector<T>, kParts = kTileDepth / N;
  for (int v = static_cast<int>(threadIdx.x); v < Count * kParts; v += kProductThreads) {
    const int row = v / kParts, at = v % kParts * N;
    float x[N];
    // A row outside the matrix reads nothing; the address is only formed for one inside.
    const int64_t left = first + row < rows ? depth - k - at : 0;
    const T* p = left > 0 ? source + (first + row) * stride + k + at : source;
    load_vector(p, left, aligned, x);
#pragma unroll
    for (int i = 0; i < N; ++i) to[(at + i) * Stride + row] = x[i];
  }
}

// Shared memory of one tile product. `logits` may be read after product_tile.
template <int Rows>
struct ProductTile {
  float x[kTileDepth * (Rows + 1)];
  float w[kTileDepth * kTileStride];
  float logits[Rows * kTileStride];
};

// tile.logits[r][c] = x[first_row + r]·w[first_column + c], every sum in ascending order of depth by fused steps: the
// same bits for a row whatever the tile's height and place. Rows at or past `row_end` count as zero.
template <class T, int Rows>
__device__ __forceinline__ void product_tile(const ProductArguments<T>& a, int64_t first_row, int64_t row_end,
                                             int64_t first_column, ProductTile<Rows>& tile) {
  constexpr int kOwnColumns = Rows >= 64 ? 4 : 2, kAcross = kTileColumns / kOwnColumns;
  constexpr int kDown = kProductThreads / kAcross, kOwnRows = Rows / kDown;
  static_assert(kOwnRows * kDown == Rows);
  const int column = static_cast<int>(threadIdx.x) % kAcross, row = static_cast<int>(threadIdx.x) / kAcross;
  const bool x_aligned = rows_aligned(a.x, a.x_row), w_aligned = rows_aligned(a.w, a.w_row);
  float sums[kOwnRows][kOwnColumns] = {};
  for (int64_t k = 0; k < a.depth; k += kTileDepth) {
    load_tile<T, Rows, Rows + 1>(a.x, a.x_row, first_row, row_end, k, a.depth, x_aligned, tile.x);
    load_tile<T, kTileColumns, kTileStride>(a.w, a.w_row, first_column, a.columns, k, a.depth, w_aligned, tile.w);
    __syncthreads();
#pragma unroll 8
    for (int d = 0; d < kTileDepth; ++d) {
      float x[kOwnRows], w[kOwnColumns];
#pragma unroll
      for (int i = 0; i < kOwnRows; ++i) x[i] = tile.x[d * (Rows + 1) + row + i * kDown];
#pragma unroll
      for (int j = 0; j < kOwnColumns; ++j) w[j] = tile.w[d * kTileStride + column + j * kAcross];
#pragma unroll
      for (int i = 0; i < kOwnRows; ++i) {
#pragma unroll
        for (int j = 0; j < kOwnColumns; ++j) sums[i][j] = fmaf(x[i], w[j], sums[i][j]);
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < kOwnRows; ++i) {
#pragma unroll
    for (int j = 0; j < kOwnColumns; ++j) {
      tile.logits[(row + i * kDown) * kTileStride + column + j * kAcross] = sums[i][j];
    }
  }
  __syncthreads();
}

// x·w over `depth` elements by one warp, the sum in every lane.
template <class T>
__device__ __forceinline__ float warp_dot(const T* x, const T* w, int64_t depth) {
  constexpr int N = kVector<T>;
  const bool aligned = is_aligned(x) && is_aligned(w);
  float sum = 0.0f;
  for (int64_t k = static_cast<int64_t>(threadIdx.x % kWarp) * N; k < depth; k += kWarp * N) {
    float a[N], b[N];
    load_vector(x + k, depth - k, aligned, a);
    load_vector(w + k, depth - k, aligned, b);
#pragma unroll
    for (int i = 0; i < N; ++i) sum = fmaf(a[i], b[i], sum);
  }
  return warp_sum(sum);
}

}  // namespace pyruntime::cuda
