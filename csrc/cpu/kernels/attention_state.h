// The rows of a tile of attention: which keys they see, and the softmax that they have summed so far.
#pragma once

#include "vec.h"

namespace pyruntime::PYRUNTIME_ISA {
namespace {

constexpr int64_t kKeys = 64;
constexpr int64_t kSplit = 8 * kKeys;
constexpr int64_t kTileRows = 64;
constexpr float kNothing = -__builtin_huge_valf();

int64_t padded(int64_t width) { return (width + kLanes - 1) / kLanes * kLanes; }
int64_t smallest(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t largest(int64_t a, int64_t b) { return a > b ? a : b; }

// A softmax under way: of each row the largest score, the sum of e^(score - largest), the values weighted likewise.
struct State {
  float* out;     // [kTileRows, Dv]
  float* maxima;  // [kTileRows]
  float* sums;    // [kTileRows]
};

int64_t state_size(const AttentionArgs& a) { return kTileRows * (padded(a.value_width) + 2); }

State carve_state(const AttentionArgs& a, float* memory) {
  float* maxima = memory + kTileRows * padded(a.value_width);
  return {memory, maxima, maxima + kTileRows};
}

// What a tile's rows are: which keys they see, where they are read and written.
struct Span {
  Span(const AttentionArgs& args, const AttentionTile& tile) : a(args), t(tile) {
    start = a.query_starts[t.sequence];
    const int64_t queries = a.query_starts[t.sequence + 1] - start;
    keys = a.kv_lengths != nullptr ? a.kv_lengths[t.sequence] : queries;
    offset = keys - queries;
    group = a.q_heads / a.kv_heads;
    rows = (t.row_end - t.row_begin) * group;
    first = low(0) / kKeys * kKeys;
    last = high(rows - 1);
  }
  int64_t position(int64_t row) const { return offset + t.row_begin + row / group; }
  int64_t token(int64_t row) const { return start + t.row_begin + row / group; }
  int64_t head(int64_t row) const { return t.kv_head * group + row % group; }
  template <class T>
  const typename T::Element* query(int64_t row) const {
    return static_cast<const typename T::Element*>(a.q) + token(row) * a.q_row + head(row) * a.q_head;
  }
  int64_t low(int64_t row) const { return a.window_left < 0 ? 0 : largest(0, position(row) - a.window_left); }
  int64_t high(int64_t row) const {
    if (a.causal) return position(row) + 1;
    return a.window_right < 0 ? keys : smallest(keys, position(row) + a.window_right + 1);
  }

  const AttentionArgs& a;
  const AttentionTile& t;
  int64_t start, keys, offset, group, rows;
  int64_t first, last;  // keys that any row sees, from the start of a block on
};

// Before the first split: nothing, or the sinks.
void begin_total(const Span& s, const State& total) {
  const float* sinks = s.a.sinks;
  for (int64_t r = 0; r < s.rows; ++r) {
    total.maxima[r] = sinks != nullptr ? sinks[s.head(r)] : kNothing;
    total.sums[r] = sinks != nullptr ? 1.0f : 0.0f;
  }
  memset(total.out, 0, static_cast<size_t>(s.rows * padded(s.a.value_width)) * sizeof(float));
}

// Splits are taken in order, so the result is the same whichever threads computed them.
void add_part(const Span& s, const State& part, const State& total) {
  const int64_t dv = padded(s.a.value_width);
  for (int64_t r = 0; r < s.rows; ++r) {
    if (part.maxima[r] == kNothing) continue;
    const float before = total.maxima[r], here = part.maxima[r];
    const float top = here > before || here != here ? here : before;
    const float keep = before == kNothing ? 0.0f : exponential(splat(before - top))[0];
    const float take = exponential(splat(here - top))[0];
    total.maxima[r] = top;
    total.sums[r] = total.sums[r] * keep + part.sums[r] * take;
    for (int64_t c = 0; c < dv; c += kLanes) {
      const Vec sum = load_as<Vec>(total.out + r * dv + c) * keep + load_as<Vec>(part.out + r * dv + c) * take;
      memcpy(total.out + r * dv + c, &sum, sizeof(sum));
    }
  }
}

template <class T>
void write_rows(const Span& s, const State& total) {
  const AttentionArgs& a = s.a;
  const int64_t dv = padded(a.value_width);
  for (int64_t r = 0; r < s.rows; ++r) {
    auto* out = static_cast<typename T::Element*>(a.out) + (s.token(r) * a.q_heads + s.head(r)) * a.value_width;
    // A row that sees no key (a window that lies outside the sequence) answers zero.
    Vec factor = splat(total.sums[r] == 0.0f ? 0.0f : 1.0f / total.sums[r]);
    for (int64_t c = 0; c < a.value_width; c += kLanes) {
      store_narrow<T>(out + c, load_as<Vec>(total.out + r * dv + c) * factor, a.value_width - c);
    }
  }
}

}  // namespace
}  // namespace pyruntime::PYRUNTIME_ISA
