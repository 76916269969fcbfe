// Attention over packed or paged keys: blocked over keys with an online softmax, float32 sums, no [L, L] matrix.
//
// A tile is up to kTileRows rows (query position × query head of one key head). Key blocks start at multiples of kKeys
// of the key's position in its sequence, so a row's sums have the same order in any tile, any chunk of a prompt, any
// page size.
#include "attention_tile.h"

namespace pyruntime::PYRUNTIME_ISA {
namespace {

// Scores of one row over keys [block, block + group) become weights; only [low, high) are visible. Returns the factor
// for what the row has summed so far.
float soften(const AttentionArgs& a, float* scores, int64_t block, int64_t group, int64_t low, int64_t high,
             float& maximum, float& sum) {
  const IntVec lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  Vec top = splat(kNothing);
  bool inside = low <= block && high >= block + group;
  for (int64_t j = 0; j < group; j += kLanes) {
    Vec s = load_as<Vec>(scores + j) * a.scale;
    if (a.softcap != 0.0f) s = hyperbolic_tangent(s * (1.0f / a.softcap)) * a.softcap;
    if (!inside) {
      IntVec key = lane + static_cast<int32_t>(block + j);
      IntVec visible = (key >= static_cast<int32_t>(low)) & (key < static_cast<int32_t>(high));
      s = visible ? s : splat(kNothing);
    }
    top = maximum_or_nan(s, top);
    memcpy(scores + j, &s, sizeof(s));
  }
  float highest = maximum;
#pragma GCC unroll 4
  for (int32_t distance = 8; distance > 0; distance /= 2) top = maximum_or_nan(top, exchange(top, distance));
  highest = (top[0] > highest || top[0] != top[0]) ? top[0] : highest;
  if (highest == kNothing) {
    memset(scores, 0, static_cast<size_t>(group) * sizeof(float));
    return 1.0f;
  }
  Vec total{};
  for (int64_t j = 0; j < group; j += kLanes) {
    Vec p = exponential(load_as<Vec>(scores + j) - highest);
    total += p;
    memcpy(scores + j, &p, sizeof(p));
  }
  float correction = maximum == kNothing ? 0.0f : exponential(splat(maximum - highest))[0];
  sum = sum * correction + sum_of(total);
  maximum = highest;
  return correction;
}

template <class T>
void run(const AttentionArgs& a, const AttentionTile& t, float* scratch) {
  using Element = typename T::Element;
  const Buffers b = carve(a, scratch);
  const int64_t d = padded(a.key_width), dv = padded(a.value_width), group = a.q_heads / a.kv_heads;
  const int64_t start = a.query_starts[t.sequence], queries = a.query_starts[t.sequence + 1] - start;
  const int64_t keys = a.kv_lengths != nullptr ? a.kv_lengths[t.sequence] : queries;
  const int64_t offset = keys - queries;  // position of the sequence's first query row
  const int64_t rows = (t.row_end - t.row_begin) * group;

  auto low = [&](int64_t position) { return a.window_left < 0 ? 0 : largest(0, position - a.window_left); };
  auto high = [&](int64_t position) {
    if (a.causal) return position + 1;
    return a.window_right < 0 ? keys : smallest(keys, position + a.window_right + 1);
  };
  for (int64_t r = 0; r < rows; ++r) {
    int64_t token = start + t.row_begin + r / group, head = t.kv_head * group + r % group;
    widen_row<T>(static_cast<const Element*>(a.q) + token * a.q_row + head * a.q_head, b.q + r * d, a.key_width, d);
    b.maxima[r] = a.sinks != nullptr ? a.sinks[head] : kNothing;
    b.sums[r] = a.sinks != nullptr ? 1.0f : 0.0f;
  }
  memset(b.out, 0, static_cast<size_t>(rows * dv) * sizeof(float));

  const bool turned = keys_in_lanes(a);
  const int64_t first = low(offset + t.row_begin) / kKeys * kKeys, last = high(offset + t.row_end - 1);
  for (int64_t block = first; block < last; block += kKeys) {
    const int64_t end = smallest(block + kKeys, last), width = padded(end - block);
    load_keys<T>(a, t, block, end, b);
    int64_t r = 0;
    if (turned) {
      transpose_keys(b, width, d);
      for (; r + 4 <= rows; r += 4) score_lanes<4>(b, r, width, d);
      for (; r < rows; ++r) score_lanes<1>(b, r, width, d);
    }
    for (; r + 4 <= rows; r += 4) score_rows<4>(b, r, width, d);
    for (; r + 2 <= rows; r += 2) score_rows<2>(b, r, width, d);
    for (; r < rows; ++r) score_rows<1>(b, r, width, d);
    float correction[kTileRows];
    for (r = 0; r < rows; ++r) {
      int64_t position = offset + t.row_begin + r / group;
      correction[r] = soften(a, b.scores + r * kKeys, block, width, low(position), smallest(high(position), end),
                             b.maxima[r], b.sums[r]);
    }
    for (r = 0; r + 4 <= rows; r += 4) value_rows<4>(b, r, end - block, dv, correction + r);
    for (; r + 2 <= rows; r += 2) value_rows<2>(b, r, end - block, dv, correction + r);
    for (; r < rows; ++r) value_rows<1>(b, r, end - block, dv, correction + r);
  }
  for (int64_t r = 0; r < rows; ++r) {
    int64_t token = start + t.row_begin + r / group, head = t.kv_head * group + r % group;
    Element* out = static_cast<Element*>(a.out) + (token * a.q_heads + head) * a.value_width;
    // A row that sees no key (a window that lies outside the sequence) answers zero.
    Vec factor = splat(b.sums[r] == 0.0f ? 0.0f : 1.0f / b.sums[r]);
    for (int64_t c = 0; c < a.value_width; c += kLanes) {
      store_narrow<T>(out + c, load_as<Vec>(b.out + r * dv + c) * factor, a.value_width - c);
    }
  }
}

}  // namespace

int64_t attention_tile_rows(const AttentionArgs& a) { return largest(1, kTileRows / (a.q_heads / a.kv_heads)); }

int64_t attention_scratch(const AttentionArgs& a) {
  int64_t d = padded(a.key_width), dv = padded(a.value_width);
  return (kTileRows + kKeys) * (d + dv) + kTileRows * kKeys + 2 * kTileRows;
}

void attention(const AttentionArgs& a, const AttentionTile& t, float* scratch) {
  switch (a.dtype) {
    case DType::kFloat32:
      return run<Float32>(a, t, scratch);
    case DType::kBFloat16:
      return run<BFloat16>(a, t, scratch);
    case DType::kFloat16:
      return run<Float16>(a, t, scratch);
  }
}

}  // namespace pyruntime::PYRUNTIME_ISA
