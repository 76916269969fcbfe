// One draw from a row of logits: temperature, top-k, top-p, min-p, then a counter-based uniform. No sort: thresholds
// are found by radix search over the bits of the shifted logits.
#include "vec.h"

namespace pyruntime::PYRUNTIME_ISA {
namespace {

constexpr float kInfinity = __builtin_huge_valf();

// Philox4x32-10 (Salmon et al. 2011), key: seed, counter: (position, index). A double in [0, 1) of 53 bits.
double uniform(uint64_t seed, uint64_t position, uint32_t index) {
  uint32_t c[4] = {static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32), index, 0};
  uint32_t k[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53u} * c[0], b = uint64_t{0xCD9E8D57u} * c[2];
    const uint32_t next[4] = {static_cast<uint32_t>(b >> 32) ^ c[1] ^ k[0], static_cast<uint32_t>(b),
                              static_cast<uint32_t>(a >> 32) ^ c[3] ^ k[1], static_cast<uint32_t>(a)};
    memcpy(c, next, sizeof(c));
    k[0] += 0x9E3779B9u, k[1] += 0xBB67AE85u;
  }
  const uint64_t bits = (uint64_t{c[0]} << 21) | (c[1] >> 11);
  return static_cast<double>(bits) * 0x1p-53;
}

// What is still in the draw, in id order: z = (logit - maximum) / temperature <= 0, p = e^z; ids null: every id.
struct Candidates {
  float* z;
  float* p;
  int32_t* ids;
  int64_t count;
  bool all;
};

// Rises as the probability falls.
inline uint32_t rank_of(float z) {
  uint32_t bits;
  memcpy(&bits, &z, sizeof(bits));
  return bits & 0x7fffffffu;
}

// Keeps candidates of rank below `rank`, and of that very rank the first `ties` by id.
void keep(Candidates& c, uint32_t rank, int64_t ties) {
  int64_t kept = 0;
  for (int64_t i = 0; i < c.count; ++i) {
    const uint32_t own = rank_of(c.z[i]);
    if (own > rank) continue;
    if (own == rank && ties-- <= 0) continue;
    const int32_t id = c.all ? static_cast<int32_t>(i) : c.ids[i];
    c.z[kept] = c.z[i], c.p[kept] = c.p[i], c.ids[kept] = id;
    ++kept;
  }
  c.count = kept;
  c.all = false;
}

// Radix search from the most probable down, 11 + 10 + 10 bits of the rank: where the running total of `weigh` over the
// candidates reaches `target`. `before` is the total of all lower ranks. False: it never does.
template <class Amount, class Weigh>
bool find_rank(const Candidates& c, Amount target, const Weigh& weigh, uint32_t& rank, Amount& before) {
  constexpr int kShifts[3] = {20, 10, 0}, kBits[3] = {11, 10, 10};
  uint32_t prefix = 0;
  before = 0;
  for (int level = 0; level < 3; ++level) {
    Amount bins[2048] = {};
    const int shift = kShifts[level];
    const uint32_t mask = (1u << kBits[level]) - 1;
    for (int64_t i = 0; i < c.count; ++i) {
      const uint32_t own = rank_of(c.z[i]);
      if (level > 0 && own >> kShifts[level - 1] != prefix) continue;
      bins[(own >> shift) & mask] += weigh(i);
    }
    uint32_t bin = 0;
    while (bin <= mask && (bins[bin] == 0 || before + bins[bin] < target)) before += bins[bin++];
    if (bin > mask) return false;
    prefix = (prefix << kBits[level]) | bin;
  }
  rank = prefix;
  return true;
}

void keep_top_k(Candidates& c, int64_t k) {
  if (k <= 0 || k >= c.count) return;
  uint32_t rank;
  int64_t before;
  if (find_rank<int64_t>(c, k, [](int64_t) { return int64_t{1}; }, rank, before)) keep(c, rank, k - before);
}

// The sum of p over [begin, end) in double.
double mass(const float* p, int64_t begin, int64_t end) {
  double sums[8] = {};
  int64_t i = begin;
  for (; i + 8 <= end; i += 8) {
    for (int j = 0; j < 8; ++j) sums[j] += static_cast<double>(p[i + j]);
  }
  double total = 0;
  for (double s : sums) total += s;
  for (; i < end; ++i) total += static_cast<double>(p[i]);
  return total;
}

void keep_top_p(Candidates& c, float top_p) {
  if (top_p >= 1.0f) return;
  const double target = static_cast<double>(top_p) * mass(c.p, 0, c.count);
  uint32_t rank;
  double before;
  // Rounding may leave the total a hair short of the target: then everything stays.
  if (!find_rank<double>(c, target, [&](int64_t i) { return static_cast<double>(c.p[i]); }, rank, before)) return;
  float z;
  const uint32_t bits = rank | 0x80000000u;
  memcpy(&z, &bits, sizeof(z));
  const double each = static_cast<double>(exponential(splat(z))[0]);
  // Candidates of one rank are equally probable; as few of them as reach the target.
  int64_t ties = 1;
  if (each > 0) {
    const double needed = __builtin_ceil((target - before) / each);
    if (needed > 1) ties = static_cast<int64_t>(needed);
  }
  keep(c, rank, ties);
}

int64_t draw(const Candidates& c, double u) {
  constexpr int64_t kBlock = 512;
  const double target = u * mass(c.p, 0, c.count);
  double before = 0;
  int64_t last = -1;  // the last candidate that can be drawn, should rounding carry the search past the end
  for (int64_t block = 0; block < c.count; block += kBlock) {
    const int64_t end = block + kBlock < c.count ? block + kBlock : c.count;
    const double here = mass(c.p, block, end);
    if (before + here <= target) {
      if (here > 0) last = block;
      before += here;
      continue;
    }
    for (int64_t i = block; i < end; ++i) {
      if (c.p[i] <= 0.0f) continue;
      last = i;
      before += static_cast<double>(c.p[i]);
      if (before > target) return i;
    }
    return last;
  }
  // `last` is the start of the last block with mass.
  for (int64_t i = c.count - 1; i > last; --i) {
    if (c.p[i] > 0.0f) return i;
  }
  return last;
}

template <class T>
float load_row(const SampleArgs& a, int64_t row, float* z) {
  using Element = typename T::Element;
  using Part = std::conditional_t<sizeof(Element) == 4, Vec, HalfWords>;
  const Element* p = static_cast<const Element*>(a.logits) + row * a.row_stride;
  Vec top = splat(-kInfinity);
  IntVec bad{};
  int64_t i = 0;
  for (; i + kLanes <= a.vocabulary; i += kLanes) {
    const Vec v = widen(load_as<Part>(p + i), T{});
    top = maximum(v, top);
    bad |= ~(v < splat(kInfinity));
    memcpy(z + i, &v, sizeof(v));
  }
  if (i < a.vocabulary) {
    const int64_t count = a.vocabulary - i;
    const IntVec lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    Vec v = widen(load_first<Part>(p + i, count, sizeof(Element)), T{});
    v = lane < static_cast<int32_t>(count) ? v : splat(-kInfinity);
    top = maximum(v, top);
    bad |= ~(v < splat(kInfinity));
    store_narrow<Float32>(z + i, v, count);
  }
  for (int64_t j = 0; j < kLanes; ++j) {
    if (bad[j]) return kInfinity;
  }
  return maximum_of(top);
}

// z becomes (z - top) / temperature and p its exponential.
void shift(float* z, float* p, int64_t count, float top, float temperature) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Vec scaled = (load_as<Vec>(z + i) - top) / temperature;
    const Vec e = exponential(scaled);
    memcpy(z + i, &scaled, sizeof(scaled));
    memcpy(p + i, &e, sizeof(e));
  }
  if (i == count) return;
  const Vec scaled = (load_first<Vec>(z + i, count - i, sizeof(float)) - top) / temperature;
  store_narrow<Float32>(z + i, scaled, count - i);
  store_narrow<Float32>(p + i, exponential(scaled), count - i);
}

}  // namespace

void sample(const SampleArgs& a, int64_t row, float* scratch) {
  float* z = scratch;
  float* p = z + a.vocabulary;
  float top = kInfinity;
  if (a.dtype == DType::kFloat32) top = load_row<Float32>(a, row, z);
  if (a.dtype == DType::kBFloat16) top = load_row<BFloat16>(a, row, z);
  if (a.dtype == DType::kFloat16) top = load_row<Float16>(a, row, z);
  a.out[row] = -1;
  if (top == kInfinity || top == -kInfinity) return;
  if (a.temperature[row] == 0.0f) {
    int64_t id = 0;
    while (z[id] != top) ++id;
    a.out[row] = id;
    return;
  }
  shift(z, p, a.vocabulary, top, a.temperature[row]);
  Candidates c{z, p, reinterpret_cast<int32_t*>(p + a.vocabulary), a.vocabulary, true};
  keep_top_k(c, a.top_k[row]);
  keep_top_p(c, a.top_p[row]);
  // The largest probability is e^0 = 1 in these units, so min_p is the bound itself.
  for (int64_t i = 0; i < c.count && a.min_p[row] > 0.0f; ++i) c.p[i] = c.p[i] >= a.min_p[row] ? c.p[i] : 0.0f;
  const int64_t at = draw(c, uniform(static_cast<uint64_t>(a.seeds[row]), static_cast<uint64_t>(a.positions[row]),
                                     static_cast<uint32_t>(a.indices[row])));
  a.out[row] = c.all ? at : c.ids[at];
}

}  // namespace pyruntime::PYRUNTIME_ISA
