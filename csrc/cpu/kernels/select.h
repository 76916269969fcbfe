// Thresholds among candidates by radix search over the bits of z: no sort.
#pragma once

#include "row.h"

namespace pyruntime::PYRUNTIME_ISA {
namespace {

// Keeps candidates of rank below `rank`, and of that very rank the first `ties` by id.
inline void keep(Candidates& c, uint32_t rank, uint64_t ties) {
  int64_t kept = 0;
  for (int64_t i = 0; i < c.count; ++i) {
    const uint32_t own = shared::rank_of(c.z[i]);
    if (own > rank) continue;
    if (own == rank) {
      if (ties == 0) continue;
      --ties;
    }
    c.z[kept] = c.z[i], c.e[kept] = c.e[i], c.ids[kept] = c.ids[i];
    ++kept;
  }
  c.count = kept;
}

constexpr int64_t kFew = 96;

// find_rank for so few that sorting them beats counting in bins.
template <class Amount>
uint32_t find_rank_of_few(const float* z, int64_t count, uint64_t target, const Amount& amount, uint64_t& before) {
  uint32_t ranks[kFew];
  uint64_t amounts[kFew];
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t rank = shared::rank_of(z[i]);
    int64_t at = i;
    for (; at > 0 && ranks[at - 1] > rank; --at) ranks[at] = ranks[at - 1], amounts[at] = amounts[at - 1];
    ranks[at] = rank, amounts[at] = amount(i);
  }
  uint64_t total = 0;
  before = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (i > 0 && ranks[i] != ranks[i - 1]) before = total;
    total += amounts[i];
    // The whole rank counts, however many share it; `before` is the total of lower ones.
    if (total >= target) return ranks[i];
  }
  return count == 0 ? 0 : ranks[count - 1];
}

// From the most probable down, by 11 + 10 + 10 bits of the rank: where the running total of amount(i) over z[0, count)
// reaches `target`, which the whole total does. `before` is the total of all lower ranks.
// With two levels the answer is the last rank of the 2^10 that share its upper bits.
template <class Amount>
uint32_t find_rank(const float* z, int64_t count, uint64_t target, const Amount& amount, uint64_t& before,
                   int levels = 3) {
  if (count <= kFew) return find_rank_of_few(z, count, target, amount, before);
  constexpr int kShifts[3] = {20, 10, 0}, kBits[3] = {11, 10, 10};
  uint32_t prefix = 0;
  before = 0;
  for (int level = 0; level < levels; ++level) {
    uint64_t bins[2048] = {};
    const int shift = kShifts[level];
    const uint32_t mask = (1u << kBits[level]) - 1;
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t own = shared::rank_of(z[i]);
      if (level > 0 && own >> kShifts[level - 1] != prefix) continue;
      bins[(own >> shift) & mask] += amount(i);
    }
    uint32_t bin = 0;
    while (bin < mask && before + bins[bin] < target) before += bins[bin++];
    prefix = (prefix << kBits[level]) | bin;
  }
  return levels == 3 ? prefix : prefix << 10 | 0x3ffu;
}

constexpr auto kOne = [](int64_t) { return uint64_t{1}; };

inline uint64_t mass_of(const Candidates& c) {
  uint64_t total = 0;
  for (int64_t i = 0; i < c.count; ++i) total += shared::weight_of(c.e[i]);
  return total;
}

inline void keep_top_k(Candidates& c, int64_t k) {
  if (k >= c.count) return;
  uint64_t before;
  const uint32_t rank = find_rank(c.z, c.count, static_cast<uint64_t>(k), kOne, before);
  keep(c, rank, static_cast<uint64_t>(k) - before);
}

// The shortest head whose mass reaches `target`.
inline void keep_mass(Candidates& c, uint64_t target) {
  uint64_t before;
  const auto weight = [&](int64_t i) { return shared::weight_of(c.e[i]); };
  const uint32_t rank = find_rank(c.z, c.count, target, weight, before);
  const uint64_t each = shared::weight_of(shared::decay(shared::value_of_rank(rank)));
  keep(c, rank, shared::ties_needed(target, before, each));
}

inline void keep_min_p(Candidates& c, float min_p) {
  int64_t kept = 0;
  for (int64_t i = 0; i < c.count; ++i) {
    if (c.e[i] < min_p) continue;
    c.z[kept] = c.z[i], c.e[kept] = c.e[i], c.ids[kept] = c.ids[i];
    ++kept;
  }
  c.count = kept;
}

// A bound on z that at least k ids reach: k blocks have their largest value at or above it.
inline float bound_of_top(const Row& row, int64_t k) {
  const int64_t blocks = row.blocks();
  if (k > blocks) return -kInfinity;
  constexpr uint32_t kNothing = 0x7f800000u;  // the rank of -inf
  uint64_t before;
  const uint32_t rank = find_rank(row.block_z, blocks, static_cast<uint64_t>(k), kOne, before, 2);
  return rank >= kNothing ? -kInfinity : shared::value_of_rank(rank);
}

inline int64_t draw_candidate(const Candidates& c, uint64_t random) {
  uint64_t left = shared::draw_target(random, mass_of(c));
  for (int64_t i = 0; i < c.count; ++i) {
    const uint64_t weight = shared::weight_of(c.e[i]);
    if (weight > left) return c.ids[i];
    left -= weight;
  }
  return -1;  // not reached: the mass exceeds the target
}

}  // namespace
}  // namespace pyruntime::PYRUNTIME_ISA
