// Attention over packed or paged keys: blocked over keys with an online softmax, float32 sums, no [L, L] matrix.
//
// Blocks of kKeys keys begin at multiples of kKeys of the key's position in its sequence, and keys are summed in splits
// of kSplit, again by position, each on its own, the splits joined in order. So a row's sums have the same order in any
// tile, any chunk of a prompt, any page size, and the same bits whether one thread block walks over all splits or each
// has its own (few rows of many keys), to be joined by attention_join_kernel.
#pragma once

#include "attention_tile.cuh"

namespace pyruntime::cuda {

// The rows of one warp, their softmax under way: of each the largest score, this lane's share of the sum of
// e^(score - largest), and of the values weighted likewise the lane's columns: kOwnColumns of every kColumns.
template <int Each, int Own>
struct AttentionState {
  float maximum[Each], sum[Each], out[Each][Own];
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < Each; ++i) {
      maximum[i] = nothing();
      sum[i] = 0.0f;
#pragma unroll
      for (int c = 0; c < Own; ++c) out[i][c] = 0.0f;
    }
  }
};

// Adds to each row's scores of the keys `lane` and `lane + kWarp` the products over the staged columns. `q`: the warp's
// first row, from the stage's first column on.
template <int Each, int Width>
__device__ __forceinline__ void add_scores(const float* stage, const float* q, float (&scores)[Each][2]) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll 4
  for (int d = 0; d < kColumns; d += 4) {
    Vector<float> k[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      k[h] = *reinterpret_cast<const Vector<float>*>(stage + (lane + h * kWarp) * kStageStride + d);
    }
#pragma unroll
    for (int i = 0; i < Each; ++i) {
      const Vector<float> own = *reinterpret_cast<const Vector<float>*>(q + i * Width + d);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int h = 0; h < 2; ++h) scores[i][h] = fmaf(own.values[j], k[h].values[j], scores[i][h]);
      }
    }
  }
}

// Scores of keys block + lane and + kWarp become weights of which [low, high) count; what the row has summed is scaled.
template <class T, int Each, int Own>
__device__ __forceinline__ void soften(const AttentionArguments<T>& a, int i, int64_t block, int64_t low, int64_t high,
                                       const float (&scores)[2], AttentionState<Each, Own>& state, float* weights) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  float x[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int64_t key = block + lane + h * kWarp;
    x[h] = scores[h] * a.scale;
    if (a.softcap != 0.0f) x[h] = tanhf(x[h] / a.softcap) * a.softcap;
    if (key < low || key >= high) x[h] = nothing();
  }
  const float highest = larger(warp_max(larger(x[0], x[1])), state.maximum[i]);
  float correction = 1.0f, p[2] = {};
  if (highest != nothing()) {
    correction = state.maximum[i] == nothing() ? 0.0f : expf(state.maximum[i] - highest);
#pragma unroll
    for (int h = 0; h < 2; ++h) p[h] = expf(x[h] - highest);
  }
  state.maximum[i] = highest;
  state.sum[i] = fmaf(state.sum[i], correction, shared::add(p[0], p[1]));
  if (correction != 1.0f) {
#pragma unroll
    for (int c = 0; c < Own; ++c) state.out[i][c] *= correction;
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) weights[lane + h * kWarp] = p[h];
}

// Adds the staged values of a block's keys times their weights to columns [first, first + kOwnColumns) of the lane's.
// A value that a row does not see may be NaN, so its weight of zero does not do: such keys are passed over.
template <bool Whole, int Each, int Own>
__device__ __forceinline__ void add_values(const float* stage, const float* weights, const int (&low)[Each],
                                           const int (&high)[Each], int first, AttentionState<Each, Own>& state) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll 2
  for (int key = 0; key < kKeys; key += 4) {
    Vector<float> p[Each];
#pragma unroll
    for (int i = 0; i < Each; ++i) p[i] = *reinterpret_cast<const Vector<float>*>(weights + i * kKeys + key);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float v[kOwnColumns];
#pragma unroll
      for (int c = 0; c < kOwnColumns; ++c) v[c] = stage[(key + j) * kStageStride + lane * kOwnColumns + c];
#pragma unroll
      for (int i = 0; i < Each; ++i) {
        if (!Whole && (key + j < low[i] || key + j >= high[i])) continue;
#pragma unroll
        for (int c = 0; c < kOwnColumns; ++c) {
          state.out[i][first + c] = fmaf(p[i].values[j], v[c], state.out[i][first + c]);
        }
      }
    }
  }
}

// Two softmaxes become one: the second's maximum and sum into the first's, and the factors of what each has summed. The
// second has seen something.
__device__ __forceinline__ void join(float& maximum, float& sum, float other_maximum, float other_sum, float& own,
                                     float& other) {
  const float highest = larger(other_maximum, maximum);
  own = maximum == nothing() ? 0.0f : expf(maximum - highest);
  other = expf(other_maximum - highest);
  maximum = highest;
  sum = fmaf(other_sum, other, shared::multiply(sum, own));
}

__device__ __forceinline__ float joined(float x, float own, float y, float other) {
  return fmaf(y, other, shared::multiply(x, own));
}

// What the sum of weighted values is multiplied with in the end. `sink`: null, or a score without a value.
__device__ __forceinline__ float final_factor(float maximum, float sum, const float* sink) {
  if (maximum == nothing()) return 0.0f;
  if (sink == nullptr) return 1.0f / sum;
  const float highest = larger(maximum, *sink), own = expf(maximum - highest);
  return own / fmaf(sum, own, expf(*sink - highest));
}

template <int Each, int Own>
__device__ __forceinline__ void join_split(AttentionState<Each, Own>& total, AttentionState<Each, Own>& part) {
#pragma unroll
  for (int i = 0; i < Each; ++i) {
    const float sum = warp_sum(part.sum[i]);
    if (part.maximum[i] == nothing()) continue;
    float own, other;
    join(total.maximum[i], total.sum[i], part.maximum[i], sum, own, other);
#pragma unroll
    for (int c = 0; c < Own; ++c) total.out[i][c] = joined(total.out[i][c], own, part.out[i][c], other);
  }
  part.clear();
}

__device__ __forceinline__ void narrow(float x, float* to) { *to = x; }
__device__ __forceinline__ void narrow(float x, __nv_bfloat16* to) { *to = __float2bfloat16_rn(x); }
__device__ __forceinline__ void narrow(float x, __half* to) { *to = __float2half_rn(x); }

// put(column, register) for each column of a row that this lane has.
template <int Own, class Put>
__device__ __forceinline__ void for_own_columns(int width, const Put& put) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
  for (int c = 0; c < Own; ++c) {
    const int column = c / kOwnColumns * kColumns + lane * kOwnColumns + c % kOwnColumns;
    if (column < width) put(column, c);
  }
}

// Adds a block of keys to the sums of the warp's rows, which see keys [low, high). Called by all threads of the block;
// warps without rows (`is_busy` false) only help to fill the stage.
template <class T, int Rows, int Width, int Each>
__device__ __forceinline__ void add_block(const AttentionArguments<T>& a, int64_t block, const int64_t (&low)[Each],
                                          const int64_t (&high)[Each], bool is_busy,
                                          AttentionShared<Rows, Width>& memory,
                                          AttentionState<Each, Width / kWarp>& state) {
  const int mine = static_cast<int>(threadIdx.x) / kWarp * Each;
  float* weights = memory.weights + mine * kKeys;
  float scores[Each][2] = {};
  for (int c = 0; c < a.key_width; c += kColumns) {
    fill_stage(a.k + blockIdx.y * a.k_head, memory.k_at, c, a.key_width, memory.stage);
    __syncthreads();
    if (is_busy) add_scores<Each, Width>(memory.stage, memory.q + mine * Width + c, scores);
    __syncthreads();
  }
  bool is_whole = true;
  int from[Each], to[Each];
#pragma unroll
  for (int i = 0; i < Each; ++i) {
    if (is_busy) soften(a, i, block, low[i], high[i], scores[i], state, weights + i * kKeys);
    is_whole = is_whole && low[i] <= block && block + kKeys <= high[i];
    from[i] = within_block(low[i] - block);
    to[i] = within_block(high[i] - block);
  }
  __syncwarp();
#pragma unroll
  for (int c = 0; c < Width / kColumns; ++c) {
    if (c * kColumns >= a.value_width) continue;
    fill_stage(a.v + blockIdx.y * a.v_head, memory.v_at, c * kColumns, a.value_width, memory.stage);
    __syncthreads();
    if (is_busy && is_whole) add_values<true>(memory.stage, weights, from, to, c * kOwnColumns, state);
    if (is_busy && !is_whole) add_values<false>(memory.stage, weights, from, to, c * kOwnColumns, state);
    __syncthreads();
  }
}

// A row's answer, or with `parts` what its split has summed.
template <class T, int Own>
__device__ __forceinline__ void put_row(const AttentionArguments<T>& a, int64_t row, float maximum, float sum,
                                        const float (&out)[Own]) {
  if (a.parts == nullptr) {
    const float factor = final_factor(maximum, sum, a.sinks != nullptr ? a.sinks + row % a.q_heads : nullptr);
    T* to = a.out + row * a.value_width;
    for_own_columns<Own>(a.value_width, [&](int column, int c) { narrow(out[c] * factor, to + column); });
    return;
  }
  float* to = a.parts + (int64_t{blockIdx.z} * a.rows * a.q_heads + row) * (a.value_width + 2);
  if (threadIdx.x % kWarp == 0) {
    to[0] = maximum;
    to[1] = sum;
  }
  if (maximum == nothing()) return;
  for_own_columns<Own>(a.value_width, [&](int column, int c) { to[2 + column] = out[c]; });
}

// Grid: tiles (rows * group / Rows + sequences), key heads, and with `parts` the splits.
template <class T, int Width, int Each>
__global__ void __launch_bounds__(kAttentionThreads) attention_kernel(const AttentionArguments<T> a) {
  constexpr int Rows = Each * kAttentionWarps;
  __shared__ AttentionShared<Rows, Width> memory;
  AttentionTile t;
  if (!find_tile<Rows>(a, blockIdx.x, t)) return;
  load_queries<Rows, Width>(a, t, memory.q);
  const int mine = static_cast<int>(threadIdx.x) / kWarp * Each;  // the warp's first row
  const bool is_busy = mine < t.count;
  int64_t low[Each], high[Each];
#pragma unroll
  for (int i = 0; i < Each; ++i) {
    const bool is_there = mine + i < t.count;
    low[i] = is_there ? lowest_key(a, t.position(mine + i)) : 0;
    high[i] = is_there ? past_highest_key(a, t.position(mine + i), t.keys) : 0;
  }
  const int64_t tile_low = lowest_key(a, t.position(0));
  const int64_t tile_high = t.is_wrong ? 0 : past_highest_key(a, t.position(t.count - 1), t.keys);
  int64_t begin = tile_low / kKeys * kKeys, end = tile_high;
  if (a.parts != nullptr) {
    const int64_t split = int64_t{blockIdx.z} * kSplit;
    begin = begin < split ? split : begin;
    end = end < split + kSplit ? end : split + kSplit;
  }

  AttentionState<Each, Width / kWarp> total, part;
  total.clear();
  part.clear();
  for (int64_t block = begin; block < end; block += kKeys) {
    if (a.parts == nullptr && block % kSplit == 0) join_split(total, part);
    locate_keys(a, t, block, tile_low, tile_high, memory.k_at, memory.v_at);
    __syncthreads();
    add_block(a, block, low, high, is_busy, memory, part);
  }
  join_split(total, part);
#pragma unroll
  for (int i = 0; i < Each; ++i) {
    if (mine + i >= t.count) continue;
    const float maximum = t.is_wrong ? not_a_number() : total.maximum[i];
    const int64_t row = t.token(mine + i) * a.q_heads + int64_t{blockIdx.y} * t.group + t.head(mine + i);
    put_row(a, row, maximum, t.is_wrong ? not_a_number() : total.sum[i], total.out[i]);
  }
}

// Grid: one warp a row and head, columns by lanes. Joins its splits in order, as the kernel above does by itself.
template <class T>
__global__ void __launch_bounds__(kAttentionThreads) attention_join_kernel(const AttentionArguments<T> a, int splits) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  const int64_t row = int64_t{blockIdx.x} * kAttentionWarps + warp, rows = a.rows * a.q_heads;
  if (row >= rows) return;
  const int64_t stride = rows * (a.value_width + 2);
  const float* first = a.parts + row * (a.value_width + 2);
  const float* sink = a.sinks != nullptr ? a.sinks + row % a.q_heads : nullptr;
  for (int column = lane; column < a.value_width; column += kWarp) {
    float maximum = nothing(), sum = 0.0f, out = 0.0f;
    for (int split = 0; split < splits; ++split) {
      const float* part = first + split * stride;
      if (part[0] == nothing()) continue;
      float own, other;
      join(maximum, sum, part[0], part[1], own, other);
      out = joined(out, own, part[2 + column], other);
    }
    narrow(out * final_factor(maximum, sum, sink), a.out + row * a.value_width + column);
  }
}

}  // namespace pyruntime::cuda
