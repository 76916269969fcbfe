// The CPU kernels: raw pointers in, no torch. Every file in this folder is compiled once for each instruction set into
// a namespace of that name; `Kernels` is the table of one instruction set and dispatch.h picks it at run time.
//
// Headers of this folder hold no inline function outside that namespace: the linker would keep one copy of it, perhaps
// the one with instructions that this processor lacks.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pyruntime {

enum class DType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

// Attention over packed sequences. Strides are in elements; the last dimension is dense.
// Without block_tables the keys are the sequence's own rows of k and v; with them key j of sequence s lies in block
// block_tables[s * table_stride + j / block_size] at offset j % block_size.
struct AttentionArgs {
  const void* q;
  const void* k;
  const void* v;
  void* out;  // [T, q_heads, value_width] dense
  DType dtype;
  int64_t q_row, q_head;
  int64_t k_block, k_row, k_head;
  int64_t v_block, v_row, v_head;
  const int32_t* query_starts;
  const int32_t* kv_lengths;    // null: packed
  const int32_t* block_tables;  // null: packed
  int64_t table_stride, block_size;
  int64_t q_heads, kv_heads, key_width, value_width;
  bool causal;
  float scale;
  int64_t window_left, window_right;  // -1: unlimited
  float softcap;                      // 0: off
  const float* sinks;                 // [q_heads] or null
};

// Query rows [row_begin, row_end) (counted in the sequence) of the query heads that share `kv_head`.
struct AttentionTile {
  int32_t sequence;
  int32_t kv_head;
  int32_t row_begin;
  int32_t row_end;
};

// The splits of the key positions that a tile's rows see: `count` from `first` on.
struct KeySplits {
  int64_t first;
  int64_t count;
};

// out[r, n] = sum_k x[r, k] * w[n, k] (+ bias[n]); x and w of `dtype`, out of the same, bias float or null.
struct LinearArgs {
  const void* x;
  const void* w;
  const float* bias;
  void* out;
  DType dtype;
  int64_t rows, columns, depth;  // R, N, K
  int64_t x_row, w_row, out_row;
};

enum class Activation : int { kNone = 0, kGelu = 1, kGeluTanh = 2, kSilu = 3 };

// y[r, n] = activation(y[r, n]) (* up[r, n]), in place; both dense in the last dimension.
struct ActivateArgs {
  void* y;
  const void* up;  // null: nothing is gated
  DType dtype;
  Activation activation;
  int64_t rows, columns;
  int64_t y_row, up_row;
};

// out[r, n] = activation(sum_k x[r, k] * w[n, k] (+ bias[n])) of rows [row_begin, row_end), times sum_k x[r, k] * up[n,
// k] where there is `up`, a matrix laid out as w. Packed, both lie in panels of sixteen columns, zeros past the last:
// for each word of depth (one float32, or two bfloat16 that follow each other, zero past the depth) that of each
// column.
struct PanelArgs {
  LinearArgs linear;
  const void* up;  // null: nothing is gated
  bool packed;
  Activation activation;
  int64_t row_begin, row_end;
  bool cached = false;  // the matrix is rather in a cache than in memory
};

// logit = softcap(scale * (x·w + bias)); partial log-sum-exp of columns [begin, end) of every row.
struct LogSumExpArgs {
  LinearArgs linear;
  float softcap, scale;
};

struct LabelArgs {
  LinearArgs linear;  // out: float32
  const int64_t* label_ids;
  const int32_t* label_starts;
};

// out [sequences, columns]: the rows of x of each sequence, reduced.
struct SparseArgs {
  LinearArgs linear;
  const int32_t* starts;
  int64_t sequences;
};

// Elements of a row, in depth, that share a scale as int8.
constexpr int64_t kInt8Group = 128;

// x[r, k] ≈ row_scales[r, g] * (q[r, k] - zeros[r, g]) for k of group g.
struct QuantizeArgs {
  const void* x;
  DType dtype;
  int64_t rows, depth, x_row;
  uint8_t* q;         // [rows, q_row], q_row = groups * kInt8Group
  float* row_scales;  // [rows, groups]
  float* zeros;       // [rows, groups]: whole numbers from 0 to 254, what 0 becomes
  int64_t q_row, groups;
};

// out[r, n] = activation(sum_g row_scales[r, g] * scales[n, g] * sum_k (q[r, k] - zeros[r, g]) * w[n, k] (+ bias[n]))
// of rows [row_begin, row_end), times the same of `up` where there is one. Matrices lie in panels of sixteen columns,
// (words + groups) * 64 bytes each, group by group: for every four neighbours in depth a word, sixteen times the four's
// int8, and behind the group's last a word for each column, the sum of its int8 below (16 bits) and its scale above
// (bfloat16).
struct Int8Args {
  const uint8_t* q;
  const float* row_scales;
  const float* zeros;
  int64_t q_row, groups;
  const uint8_t* w;
  const uint8_t* up;  // null: nothing is gated
  const float* bias;  // [columns] or null
  void* out;
  DType dtype;
  Activation activation;
  int64_t columns, words;
  int64_t row_begin, row_end, out_row;
};

// Bounds on sum_k x[r, k] * w[n, k] from its product in int8: it differs from that by at most error_weights[r] *
// errors[n] + length_weights[r] * lengths[n]. `tops` gets the greatest upper bound of each panel.
struct ScreenArgs {
  Int8Args product;  // its rows, matrix and columns alone, whole panels of them
  const float* errors;
  const float* lengths;
  const float* error_weights;
  const float* length_weights;
  int64_t rows;
  float* tops;  // [panels / 16 rounded up, rows, 16]
};

// out[r] = x[r] / rms(x[r]) * (weight + weight_offset) + residual[r], without weight x[r] + residual[r], or centred:
// layer norm of x[r] + residual[r]. Parameters [width] of the rows' dtype.
struct NormArgs {
  const void* x;
  const void* residual;  // null: nothing is added
  const void* weight;
  const void* bias;
  void* out;
  DType dtype;
  bool centred;
  int64_t rows, width;
  int64_t x_row, residual_row, out_row;
  float epsilon, weight_offset;
};

// With halves a, b of a head and c, s of its angles: out = (a c_a - b s_a, b c_b + a s_b); out [tokens, heads, width]
// dense.
struct RotateArgs {
  const void* x;
  const void* cos;
  const void* sin;
  void* out;
  DType dtype;
  int64_t tokens, heads, width;
  int64_t x_row, x_head, angle_row;
};

struct PoolArgs {
  const void* hidden;
  DType dtype;
  int64_t row_stride, width;
  float* out;  // [S, width] dense
  const int32_t* starts;
  const int32_t* kinds;
  const int32_t* dimensions;
  const uint8_t* normalize;
  const int64_t* rows;  // null unless some kind is 3
};

// Null pointers: that feature is off for the whole batch.
struct SampleArgs {
  const void* logits;
  DType dtype;
  int64_t row_stride, vocabulary;
  const float* temperature;
  const int32_t* top_k;
  const float* top_p;
  const float* min_p;
  const int64_t* seeds;
  const int64_t* positions;
  const int32_t* indices;
  const float* repetition;
  const float* frequency;
  const float* presence;
  const int64_t* seen_ids;  // those of row r at seen_starts[r] to seen_starts[r + 1]
  const int32_t* seen_generated;
  const int32_t* seen_starts;
  const int64_t* bias_ids;
  const float* bias_values;
  const int32_t* bias_starts;
  const uint32_t* bitmask;
  int64_t bitmask_stride;
  int64_t top_logprobs;  // -1: no logprobs
  int64_t* ids;
  float* logprobs;
  int64_t* top_ids;
  float* top_values;
};

struct Kernels {
  const char* name;
  // How many query rows one tile takes at most, and how many floats of scratch (64-byte aligned) it needs.
  int64_t (*attention_tile_rows)(const AttentionArgs& args);
  int64_t (*attention_scratch)(const AttentionArgs& args);
  // `after`: the tile that this thread takes next, whose first keys are read ahead, or null.
  void (*attention)(const AttentionArgs& args, const AttentionTile& tile, const AttentionTile* after, float* scratch);
  // The same in pieces, for few tiles of many keys: every split into a part of attention_part floats, then the parts,
  // which lie one after the other, joined into the answer.
  int64_t (*attention_part)(const AttentionArgs& args);
  KeySplits (*attention_splits)(const AttentionArgs& args, const AttentionTile& tile);
  void (*attention_split)(const AttentionArgs& args, const AttentionTile& tile, int64_t split, float* scratch,
                          float* part);
  void (*attention_join)(const AttentionArgs& args, const AttentionTile& tile, const float* parts, int64_t count,
                         float* scratch);
  void (*linear)(const LinearArgs& args, int64_t begin, int64_t end);  // columns [begin, end)
  void (*activate)(const ActivateArgs& args);
  // The same for many rows, or for a matrix that is packed, panel_columns columns at a time; `panel`: panel_words
  // words, 64-byte aligned, null for what is packed. No words: this instruction set has no such kernel for the dtype.
  int64_t (*panel_columns)(const PanelArgs& args);
  int64_t (*panel_words)(const PanelArgs& args);
  void (*panels)(const PanelArgs& args, int64_t begin, int64_t end, uint32_t* panel);
  // Over the columns [begin, end), 16 partial maxima and sums of exp(logit - maximum) a row: both [rows, 16].
  void (*logsumexp)(const LogSumExpArgs& args, int64_t begin, int64_t end, float* maxima, float* sums);
  void (*labels)(const LabelArgs& args, int64_t row);
  void (*sparse)(const SparseArgs& args, int64_t begin, int64_t end);           // columns [begin, end)
  void (*linear_int8)(const Int8Args& args, int64_t begin, int64_t end);        // panels [begin, end)
  void (*quantize_rows)(const QuantizeArgs& args, int64_t begin, int64_t end);  // rows [begin, end)
  // Of rows [begin, end): what ScreenArgs calls their weights, from their int8; NaN where no bound holds.
  void (*screen_rows)(const QuantizeArgs& args, int64_t begin, int64_t end, float* error_weights,
                      float* length_weights);
  // The bounds of panels [begin, end); least[r] gets the greatest lower bound of them. `scratch`: 16 floats a row.
  void (*screen)(const ScreenArgs& args, int64_t begin, int64_t end, float* least, float* scratch);
  // Of blocks of sixteen panels [begin, end) those with an upper bound of `wanted[r]` or more: masks [blocks, rows].
  void (*screened)(const ScreenArgs& args, int64_t begin, int64_t end, const float* wanted, uint16_t* masks);
  void (*normalize_rows)(const NormArgs& args, int64_t begin, int64_t end);          // rows [begin, end)
  void (*rotate)(const RotateArgs& args, int64_t begin, int64_t end);                // tokens [begin, end)
  void (*pool)(const PoolArgs& args, int64_t sequence, int64_t begin, int64_t end);  // columns [begin, end), plain
  void (*normalize)(const PoolArgs& args, int64_t sequence);                         // after all its columns
  // `scratch`: sample_scratch(vocabulary) floats. Writes row `row` of every answer.
  int64_t (*sample_scratch)(int64_t vocabulary);
  void (*sample)(const SampleArgs& args, int64_t row, float* scratch);
};

}  // namespace pyruntime
