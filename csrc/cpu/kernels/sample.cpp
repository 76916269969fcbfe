// One draw from a row of logits: penalties, bias, mask, temperature, top-k, top-p, min-p, then a counter-based number.
// What is decided, and in which arithmetic, is in shared/sampling_math.h; this file only avoids work: blocks whose
// largest value is out of reach are never looked at again.
#include "../../shared/philox.h"
#include "select.h"

namespace pyruntime::PYRUNTIME_ISA {
namespace {

// Four-byte words of scratch, in this order; everything starts on a cache line.
struct Buffers {
  float* logits;
  Candidates candidates;
  float* maxima;
  float* block_z;
  uint64_t* masses;
};

int64_t rounded(int64_t words) { return (words + 15) / 16 * 16; }

Buffers carve(float* scratch, int64_t vocabulary) {
  const int64_t wide = rounded(vocabulary) + kLanes, blocks = rounded(vocabulary / kBlock + 1);
  float* z = scratch + wide;
  float* maxima = z + 3 * wide;
  return {scratch,
          {z, z + wide, reinterpret_cast<int32_t*>(z + 2 * wide), 0},
          maxima,
          maxima + blocks,
          reinterpret_cast<uint64_t*>(maxima + 2 * blocks)};
}

template <class T>
void widen_row(const void* source, float* target, int64_t count) {
  using Element = typename T::Element;
  using Part = std::conditional_t<sizeof(Element) == 4, Vec, HalfWords>;
  const Element* p = static_cast<const Element*>(source);
  for (int64_t i = 0; i < count; i += kLanes) {
    const int64_t wide = count - i < kLanes ? count - i : kLanes;
    const Part part = wide == kLanes ? load_as<Part>(p + i) : load_first<Part>(p + i, wide, sizeof(Element));
    store_narrow<Float32>(target + i, widen(part, T{}), wide);
  }
}

// The row in float32: where it lies, if it is, else a copy in `target`.
const float* float_row(const SampleArgs& a, int64_t row, float* target) {
  const int64_t size = a.dtype == DType::kFloat32 ? 4 : 2;
  const void* source = static_cast<const char*>(a.logits) + row * a.row_stride * size;
  if (a.dtype == DType::kFloat32) return static_cast<const float*>(source);
  if (a.dtype == DType::kBFloat16) widen_row<BFloat16>(source, target, a.vocabulary);
  if (a.dtype == DType::kFloat16) widen_row<Float16>(source, target, a.vocabulary);
  return target;
}

void mask_row(const uint32_t* bitmask, float* x, int64_t count) {
  const WordVec lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  for (int64_t i = 0; i < count; i += kLanes) {
    const int64_t wide = count - i < kLanes ? count - i : kLanes;
    const WordVec bits = (WordVec{} + (bitmask[i / 32] >> (i % 32))) >> lane;
    const Vec v = (bits & 1u) != 0u ? load_first<Vec>(x + i, wide, sizeof(float)) : splat(-kInfinity);
    store_narrow<Float32>(x + i, v, wide);
  }
}

// Penalties, bias and mask; the row moves into `target` when any of them applies.
bool adjust(const SampleArgs& a, int64_t row, const float*& x, float* target) {
  const int64_t seen = a.seen_ids == nullptr ? 0 : a.seen_starts[row + 1] - a.seen_starts[row];
  const int64_t biased = a.bias_ids == nullptr ? 0 : a.bias_starts[row + 1] - a.bias_starts[row];
  if (seen == 0 && biased == 0 && a.bitmask == nullptr) return false;
  if (x != target) memcpy(target, x, static_cast<size_t>(a.vocabulary) * sizeof(float));
  x = target;
  const float repetition = a.repetition == nullptr ? 1.0f : a.repetition[row];
  const float frequency = a.frequency == nullptr ? 0.0f : a.frequency[row];
  const float presence = a.presence == nullptr ? 0.0f : a.presence[row];
  for (int64_t i = 0; i < seen; ++i) {
    const int64_t at = a.seen_starts[row] + i, id = a.seen_ids[at];
    target[id] = shared::penalised(target[id], a.seen_generated[at], repetition, frequency, presence);
  }
  for (int64_t i = 0; i < biased; ++i) {
    const int64_t at = a.bias_starts[row] + i;
    target[a.bias_ids[at]] = shared::add(target[a.bias_ids[at]], a.bias_values[at]);
  }
  if (a.bitmask != nullptr) mask_row(a.bitmask + row * a.bitmask_stride, target, a.vocabulary);
  return true;
}

int64_t largest(const Row& row) {
  int64_t i = 0;
  while (row.maxima[i] != row.top) ++i;
  i *= kBlock;
  while (row.x[i] != row.top) ++i;
  return i;
}

// A draw from all ids: first the block, by the masses that the pass over the row left behind, then the id in it.
int64_t draw_from_all(const Row& row, float temperature, uint64_t random, const Buffers& b) {
  uint64_t left = shared::draw_target(random, row_mass(row, temperature, b.masses));
  int64_t block = 0;
  while (b.masses[block] <= left) left -= b.masses[block++];
  for (int64_t i = block * kBlock; i < row.end_of(block); ++i) {
    const uint64_t weight = shared::weight_of(shared::decay(shared::shifted(row.x[i], row.top, temperature)));
    if (weight > left) return i;
    left -= weight;
  }
  return -1;  // not reached
}

// Below this z no candidate can be in the head whose mass is `target`: were all of them this heavy, what they hold
// together would still not be missed. A little lower, for the logarithm rounds.
float bound_of_mass(uint64_t total, uint64_t target, int64_t count) {
  const double spare = static_cast<double>(total - target) / static_cast<double>(count) * 0x1p-44;
  const float bound = spare > 0 ? static_cast<float>(__builtin_log(spare)) - 0.01f : kWeightless;
  return bound > kWeightless ? bound : kWeightless;
}

// All candidates down to some z that hold `target` together. Most rows need few, so bounds are tried from the top down.
void gather_mass(const Row& r, float temperature, uint64_t total, uint64_t target, Candidates& c) {
  const float lowest = bound_of_mass(total, target, r.count);
  for (float bound = -3.0f; bound > lowest; bound *= 1.6f) {
    gather(r, temperature, bound, c);
    if (mass_of(c) >= target) return;
  }
  gather(r, temperature, lowest, c);
}

int64_t choose(const SampleArgs& a, int64_t row, const Row& r, Buffers& b) {
  const float temperature = a.temperature[row], top_p = a.top_p[row], min_p = a.min_p[row];
  const int64_t k = a.top_k[row];
  if (temperature == 0.0f) return largest(r);
  const uint64_t random = shared::philox(static_cast<uint64_t>(a.seeds[row]), static_cast<uint64_t>(a.positions[row]),
                                         static_cast<uint32_t>(a.indices[row]));
  shift_maxima(r, temperature);
  Candidates& c = b.candidates;
  uint64_t target = 0;
  if (k > 0 && k < r.count) {
    gather(r, temperature, bound_of_top(r, k), c);
    keep_top_k(c, k);
    if (top_p < 1.0f) target = shared::top_p_target(top_p, mass_of(c));
  } else if (top_p < 1.0f) {
    const uint64_t total = row_mass(r, temperature, nullptr);
    target = shared::top_p_target(top_p, total);
    gather_mass(r, temperature, total, target, c);
  } else if (min_p > 0.0f) {
    gather(r, temperature, __builtin_logf(min_p) - 0.01f, c);
  } else {
    return draw_from_all(r, temperature, random, b);
  }
  if (target > 0) keep_mass(c, target);
  if (min_p > 0.0f) keep_min_p(c, min_p);
  return draw_candidate(c, random);
}

// The raw distribution: its top entries into the answer, most probable first; returns log of the sum of e^(l - max l).
float raw_logprobs(const SampleArgs& a, int64_t row, const Row& r, Buffers& b) {
  shift_maxima(r, 1.0f);
  const float log_sum = shared::log_mass(row_mass(r, 1.0f, nullptr));
  const int64_t wanted = a.top_logprobs;
  if (wanted == 0) return log_sum;
  Candidates& c = b.candidates;
  gather(r, 1.0f, bound_of_top(r, wanted), c);
  keep_top_k(c, wanted);
  for (int64_t i = 0; i < c.count; ++i) {
    // Few enough for an insertion sort; equal ones keep the order of their ids.
    int64_t at = i;
    const float z = c.z[i];
    const int32_t id = c.ids[i];
    for (; at > 0 && c.z[at - 1] < z; --at) c.z[at] = c.z[at - 1], c.ids[at] = c.ids[at - 1];
    c.z[at] = z, c.ids[at] = id;
  }
  for (int64_t i = 0; i < c.count; ++i) {
    a.top_ids[row * wanted + i] = c.ids[i];
    a.top_values[row * wanted + i] = shared::subtract(c.z[i], log_sum);
  }
  return log_sum;
}

void give_up(const SampleArgs& a, int64_t row) {
  a.ids[row] = -1;
  if (a.top_logprobs < 0) return;
  a.logprobs[row] = __builtin_nanf("");
  for (int64_t i = 0; i < a.top_logprobs; ++i) {
    a.top_ids[row * a.top_logprobs + i] = -1;
    a.top_values[row * a.top_logprobs + i] = __builtin_nanf("");
  }
}

}  // namespace

int64_t sample_scratch(int64_t vocabulary) {
  return 4 * (rounded(vocabulary) + kLanes) + 4 * rounded(vocabulary / kBlock + 1);
}

void sample(const SampleArgs& a, int64_t row, float* scratch) {
  Buffers b = carve(scratch, a.vocabulary);
  Row r{float_row(a, row, b.logits), a.vocabulary, b.maxima, b.block_z, 0.0f};
  if (!find_maxima(r) || r.top == -kInfinity) return give_up(a, row);
  const float raw_top = r.top;
  const float log_sum = a.top_logprobs >= 0 ? raw_logprobs(a, row, r, b) : 0.0f;
  if (adjust(a, row, r.x, b.logits) && (!find_maxima(r) || r.top == -kInfinity)) return give_up(a, row);
  const int64_t id = choose(a, row, r, b);
  a.ids[row] = id;
  if (a.top_logprobs < 0) return;
  // The raw row again: the adjusted one may have taken its place.
  const float* raw = float_row(a, row, b.logits);
  a.logprobs[row] = shared::subtract(shared::subtract(raw[id], raw_top), log_sum);
}

}  // namespace pyruntime::PYRUNTIME_ISA
