// Tiles of attention: which rows and keys a thread block has, where they lie, and how they come into shared memory.
#pragma once

#include "primitives.cuh"

namespace pyruntime::cuda {

constexpr int kAttentionThreads = 128;
constexpr int kAttentionWarps = kAttentionThreads / kWarp;
constexpr int kKeys = 64;
constexpr int kSplit = 8 * kKeys;
constexpr int kColumns = 64;                // of keys or values in shared memory at a time
constexpr int kStageStride = kColumns + 4;  // lanes read 16 bytes of 8 neighbouring rows from different banks
constexpr int kOwnColumns = kColumns / kWarp;
constexpr int kWidest = 512;  // heads

template <class T>
struct AttentionArguments {
  const T* q;  // [rows, q_heads, key_width]
  const T* k;  // packed [rows, kv_heads, key_width], or blocks [blocks, block_size, kv_heads, key_width]
  const T* v;
  T* out;                                                                 // [rows, q_heads, value_width] dense
  int64_t q_row, q_head, k_row, k_head, k_block, v_row, v_head, v_block;  // strides in elements
  int64_t rows, sequences;
  int q_heads, kv_heads, key_width, value_width;
  const int32_t* query_starts;  // [S + 1]
  const int32_t* kv_lengths;    // [S]; null: packed
  const int32_t* block_tables;  // [S, table_width]
  int64_t table_width, block_size, blocks;
  bool causal;
  int64_t window_left, window_right;  // at most INT32_MAX
  float scale, softcap;
  const float* sinks;  // [q_heads] or null
  float* parts;        // null, or [splits, rows, q_heads, value_width + 2]: maximum, sum, unscaled answer of each split
};

__device__ __forceinline__ float nothing() { return -infinity(); }

// Rows [first, first + count) of a sequence, counted query by query, in each the heads of one key head.
struct AttentionTile {
  int64_t sequence, start, keys, offset, first;
  int count, group;
  bool is_wrong;  // what the host cannot see: more keys than pages, or fewer than queries
  __device__ __forceinline__ int64_t position(int row) const { return offset + (first + row) / group; }
  __device__ __forceinline__ int64_t token(int row) const { return start + (first + row) / group; }
  __device__ __forceinline__ int head(int row) const { return static_cast<int>((first + row) % group); }
};

// Sequence i's tiles are numbered from here on, which leaves room for all of those before it; some numbers stay unused.
template <class T>
__device__ __forceinline__ int64_t first_tile(const AttentionArguments<T>& a, int64_t sequence, int group, int rows) {
  return int64_t{a.query_starts[sequence]} * group / rows + sequence;
}

// False where nothing is to be done under this number.
template <int Rows, class T>
__device__ __forceinline__ bool find_tile(const AttentionArguments<T>& a, int64_t number, AttentionTile& t) {
  t.group = a.q_heads / a.kv_heads;
  int64_t last = a.sequences;
  t.sequence = 0;
  while (last - t.sequence > 1) {
    const int64_t middle = (t.sequence + last) / 2;
    (first_tile(a, middle, t.group, Rows) <= number ? t.sequence : last) = middle;
  }
  t.start = a.query_starts[t.sequence];
  const int64_t end = a.query_starts[t.sequence + 1], queries = end - t.start;
  if (t.start < 0 || queries < 0 || end > a.rows) return false;
  t.first = (number - first_tile(a, t.sequence, t.group, Rows)) * Rows;
  const int64_t left = queries * t.group - t.first;
  if (t.first < 0 || left <= 0) return false;
  t.count = static_cast<int>(left < Rows ? left : Rows);
  t.keys = a.kv_lengths != nullptr ? a.kv_lengths[t.sequence] : queries;
  t.is_wrong = a.kv_lengths != nullptr && (t.keys < queries || t.keys > a.table_width * a.block_size);
  t.offset = t.keys - queries;
  return true;
}

// Keys [low, high) are visible to a row at a position.
template <class T>
__device__ __forceinline__ int64_t lowest_key(const AttentionArguments<T>& a, int64_t position) {
  return a.window_left < 0 || position < a.window_left ? 0 : position - a.window_left;
}

template <class T>
__device__ __forceinline__ int64_t past_highest_key(const AttentionArguments<T>& a, int64_t position, int64_t keys) {
  if (a.causal) return position + 1;
  return a.window_right < 0 || position + a.window_right + 1 > keys ? keys : position + a.window_right + 1;
}

// A place in a block of keys for a distance from its first.
__device__ __forceinline__ int within_block(int64_t distance) {
  return distance <= 0 ? 0 : static_cast<int>(distance < kKeys ? distance : kKeys);
}

constexpr int64_t kUnseen = -1, kWrongPage = -2;

template <int Rows, int Width>
struct alignas(16) AttentionShared {
  float stage[kKeys * kStageStride];
  float q[Rows * Width];
  float weights[Rows * kKeys];
  int64_t k_at[kKeys], v_at[kKeys];  // where the rows of a block's keys begin, or one of the two above
};

// Where the keys [block, block + kKeys) lie; those outside [low, high) are seen by no row of the tile and not read.
template <class T>
__device__ __forceinline__ void locate_keys(const AttentionArguments<T>& a, const AttentionTile& t, int64_t block,
                                            int64_t low, int64_t high, int64_t* k_at, int64_t* v_at) {
  for (int i = static_cast<int>(threadIdx.x); i < kKeys; i += kAttentionThreads) {
    const int64_t key = block + i;
    int64_t k = kUnseen, v = kUnseen;
    if (low <= key && key < high) {
      if (a.kv_lengths == nullptr) {
        k = (t.start + key) * a.k_row;
        v = (t.start + key) * a.v_row;
      } else {
        const auto number = static_cast<uint32_t>(key), size = static_cast<uint32_t>(a.block_size);
        const int64_t page = a.block_tables[t.sequence * a.table_width + number / size], row = number % size;
        const bool is_there = 0 <= page && page < a.blocks;
        k = is_there ? page * a.k_block + row * a.k_row : kWrongPage;
        v = is_there ? page * a.v_block + row * a.v_row : kWrongPage;
      }
    }
    k_at[i] = k;
    v_at[i] = v;
  }
}

// The tile's queries as float, zeros where there are none. Read after a barrier.
template <int Rows, int Width, class T>
__device__ __forceinline__ void load_queries(const AttentionArguments<T>& a, const AttentionTile& t, float* q) {
  for (int i = static_cast<int>(threadIdx.x); i < Rows * Width; i += kAttentionThreads) {
    const int row = i / Width, d = i % Width;
    float x = 0.0f;
    if (row < t.count && d < a.key_width) {
      const int64_t head = int64_t{blockIdx.y} * t.group + t.head(row);
      x = widen(a.q[t.token(row) * a.q_row + head * a.q_head + d]);
    }
    q[i] = x;
  }
}

// stage[key][column] = rows[at[key] + first + column]: zeros past `width` and for unseen keys.
template <class T>
__device__ __forceinline__ void fill_stage(const T* rows, const int64_t* at, int first, int width, float* stage) {
  constexpr int N = kVector<T>, kAcross = kColumns / N;
  for (int i = static_cast<int>(threadIdx.x); i < kKeys * kAcross; i += kAttentionThreads) {
    const int key = i / kAcross, column = i % kAcross * N;
    const int64_t place = at[key];
    float x[N];
    if (place >= 0) {
      const T* p = rows + place + first + column;
      load_vector(p, width - first - column, is_aligned(p), x);
    } else {
#pragma unroll
      for (int j = 0; j < N; ++j) x[j] = place == kUnseen ? 0.0f : not_a_number();
    }
#pragma unroll
    for (int j = 0; j < N; j += 4) {
      *reinterpret_cast<Vector<float>*>(stage + key * kStageStride + column + j) = {x[j], x[j + 1], x[j + 2], x[j + 3]};
    }
  }
}

}  // namespace pyruntime::cuda
