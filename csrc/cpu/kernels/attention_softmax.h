// Scores of a tile's rows against one block of keys to the weights of its values.
#pragma once

#include "attention_state.h"

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

// The same, bit for bit, for R rows that all see the first `count` keys of the block and no score is capped: side by
// side, for one row alone waits for each of its results.
template <int R>
void soften_rows(const AttentionArgs& a, float* scores, int64_t block, int64_t count, float* maxima, float* sums,
                 float* correction) {
  const IntVec lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const auto scaled = [&](int r, int64_t j) {
    const Vec s = load_as<Vec>(scores + r * kKeys + j) * a.scale;
    return j + kLanes <= count ? s : (lane < static_cast<int32_t>(count - j) ? s : splat(kNothing));
  };
  Vec top[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) top[r] = splat(kNothing);
  for (int64_t j = 0; j < count; j += kLanes) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) top[r] = maximum_or_nan(scaled(r, j), top[r]);
  }
#pragma GCC unroll 4
  for (int32_t distance = 8; distance > 0; distance /= 2) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) top[r] = maximum_or_nan(top[r], exchange(top[r], distance));
  }
  float highest[R];
  bool is_empty = false;
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    highest[r] = (top[r][0] > maxima[r] || top[r][0] != top[r][0]) ? top[r][0] : maxima[r];
    is_empty |= highest[r] == kNothing;
  }
  if (is_empty) {
    for (int r = 0; r < R; ++r) {
      correction[r] = soften(a, scores + r * kKeys, block, padded(count), block, block + count, maxima[r], sums[r]);
    }
    return;
  }
  Vec total[R] = {};
  for (int64_t j = 0; j < count; j += kLanes) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const Vec p = exponential(scaled(r, j) - highest[r]);
      total[r] += p;
      memcpy(scores + r * kKeys + j, &p, sizeof(p));
    }
  }
#pragma GCC unroll 4
  for (int32_t distance = 8; distance > 0; distance /= 2) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) total[r] += exchange(total[r], distance);
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    correction[r] = maxima[r] == kNothing ? 0.0f : exponential(splat(maxima[r] - highest[r]))[0];
    sums[r] = sums[r] * correction[r] + total[r][0];
    maxima[r] = highest[r];
  }
}

}  // namespace
}  // namespace pyruntime::PYRUNTIME_ISA
