// One draw from each row of logits. What is decided, and in which arithmetic, is in shared/sampling_math.h, so the
// draws are those of the CPU kernel bit for bit; the searches are in select.cuh.
#pragma once

#include "../shared/philox.h"
#include "../shared/sampling_math.h"
#include "select.cuh"

namespace pyruntime::cuda {

constexpr int64_t kMaxListed = 1024;

// Null pointers: that feature is off for the whole batch. Ids of a row in seen_ids and in bias_ids are ascending.
struct SampleArguments {
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
  const int64_t* seen_ids;
  const int32_t* seen_generated;
  const int32_t* seen_starts;
  int64_t seen;
  const int64_t* bias_ids;
  const float* bias_values;
  const int32_t* bias_starts;
  int64_t biased;
  const uint32_t* bitmask;
  int64_t bitmask_stride;
  int64_t top_logprobs;  // -1: no logprobs
  float* scratch;        // [rows, vocabulary]
  int64_t* ids;
  float* logprobs;
  int64_t* top_ids;
  float* top_values;
};

__device__ __forceinline__ float checked(float x) { return x < infinity() ? x : not_a_number(); }

// The row in float32 into x; its largest value, NaN if any is NaN or +inf.
template <class T>
__device__ float copy_row(const T* logits, int64_t count, float* x, SelectShared& s) {
  constexpr int N = kVector<T>;
  const bool aligned = is_aligned(logits);
  float top = -infinity();
  for (int64_t at = static_cast<int64_t>(threadIdx.x) * N; at < count; at += kSelectThreads * N) {
    float v[N];
    load_vector(logits + at, count - at, aligned, v);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (at + i >= count) break;
      x[at + i] = v[i];
      top = larger(top, checked(v[i]));
    }
  }
  return block_max(top, s.floats);
}

// Penalties, bias and mask on x; the new largest value, NaN if an argument is wrong.
__device__ __forceinline__ float adjust(const SampleArguments& a, int64_t row, float* x, float raw_top,
                                        SelectShared& s) {
  int64_t seen = 0, seen_end = 0, biased = 0, biased_end = 0;
  if (a.seen_ids != nullptr) seen = a.seen_starts[row], seen_end = a.seen_starts[row + 1];
  if (a.bias_ids != nullptr) biased = a.bias_starts[row], biased_end = a.bias_starts[row + 1];
  if (seen < 0 || seen_end > a.seen || biased < 0 || biased_end > a.biased) return not_a_number();
  if (seen >= seen_end && biased >= biased_end && a.bitmask == nullptr) return raw_top;
  const float repetition = a.repetition == nullptr ? 1.0f : a.repetition[row];
  const float frequency = a.frequency == nullptr ? 0.0f : a.frequency[row];
  const float presence = a.presence == nullptr ? 0.0f : a.presence[row];
  float top = -infinity();
  for (int64_t i = seen + threadIdx.x; i < seen_end; i += kSelectThreads) {
    const int64_t id = a.seen_ids[i];
    if (id < 0 || id >= a.vocabulary) {
      top = not_a_number();
    } else {
      x[id] = shared::penalised(x[id], a.seen_generated[i], repetition, frequency, presence);
    }
  }
  __syncthreads();
  for (int64_t i = biased + threadIdx.x; i < biased_end; i += kSelectThreads) {
    const int64_t id = a.bias_ids[i];
    if (id < 0 || id >= a.vocabulary) {
      top = not_a_number();
    } else {
      x[id] = shared::add(x[id], a.bias_values[i]);
    }
  }
  __syncthreads();
  const uint32_t* mask = a.bitmask == nullptr ? nullptr : a.bitmask + row * a.bitmask_stride;
  for (int64_t id = threadIdx.x; id < a.vocabulary; id += kSelectThreads) {
    if (mask != nullptr && !shared::allowed(mask, id)) x[id] = -infinity();
    top = larger(top, checked(x[id]));
  }
  return block_max(top, s.floats);
}

__device__ __forceinline__ bool parameters_valid(const SampleArguments& a, int64_t row) {
  const float temperature = a.temperature[row], top_p = a.top_p[row], min_p = a.min_p[row];
  return temperature >= 0.0f && temperature < infinity() && top_p > 0.0f && top_p <= 1.0f && min_p >= 0.0f &&
         min_p <= 1.0f && (a.repetition == nullptr || a.repetition[row] > 0.0f);
}

// Candidates in front of, and with, one in the order of (rank, id).
struct Limit {
  uint32_t rank;
  int64_t last_id;
  __device__ __forceinline__ bool keeps(uint32_t own, int64_t id) const {
    return own < rank || (own == rank && id <= last_id);
  }
};

// The id drawn. `x` becomes z of sampling_math.h.
__device__ __forceinline__ int64_t choose(const SampleArguments& a, int64_t row, float* x, float top, SelectShared& s) {
  const int64_t count = a.vocabulary, k = a.top_k[row];
  const float temperature = a.temperature[row], top_p = a.top_p[row], min_p = a.min_p[row];
  if (temperature == 0.0f) return find_id(count, 0, [&](int64_t id) -> Total { return x[id] == top ? 1 : 0; }, s);
  for (int64_t id = threadIdx.x; id < count; id += kSelectThreads) x[id] = shared::shifted(x[id], top, temperature);
  __syncthreads();
  Limit limit{0xffffffffu, count};
  const auto rank = [&](int64_t id) { return shared::rank_of(x[id]); };
  const auto weight = [&](int64_t id) -> Total {
    return limit.keeps(rank(id), id) ? shared::weight_of(shared::decay(x[id])) : 0;
  };
  Total before = 0;
  if (k > 0 && k < count) {
    const uint32_t last = find_key(count, static_cast<Total>(k), rank, [](int64_t) -> Total { return 1; }, s, before);
    const auto tied = [&](int64_t id) -> Total { return rank(id) == last ? 1 : 0; };
    const int64_t last_id = find_id(count, static_cast<Total>(k) - before - 1, tied, s);
    limit = Limit{last, last_id};
  }
  if (top_p < 1.0f) {
    const Total target = shared::top_p_target(top_p, total_of(count, weight, s));
    const uint32_t last = find_key(count, target, rank, weight, s, before);
    const Total each = shared::weight_of(shared::decay(shared::value_of_rank(last)));
    const auto tied = [&](int64_t id) -> Total { return rank(id) == last && limit.keeps(last, id) ? 1 : 0; };
    const int64_t last_id = find_id(count, shared::ties_needed(target, before, each) - 1, tied, s);
    limit = Limit{last, last_id};
  }
  const auto left = [&](int64_t id) -> Total {
    if (!limit.keeps(rank(id), id)) return 0;
    const float e = shared::decay(x[id]);
    return e < min_p ? 0 : shared::weight_of(e);
  };
  const uint64_t random = shared::philox(static_cast<uint64_t>(a.seeds[row]), static_cast<uint64_t>(a.positions[row]),
                                         static_cast<uint32_t>(a.indices[row]));
  return find_id(count, shared::draw_target(random, total_of(count, left, s)), left, s);
}

// The logarithm of the raw row's mass; the most probable ids with their logprobs into the answer.
__device__ __forceinline__ float raw_logprobs(const SampleArguments& a, int64_t row, const float* x, float top,
                                              SelectShared& s) {
  const int64_t count = a.vocabulary, wanted = a.top_logprobs;
  const auto z = [&](int64_t id) { return shared::shifted(x[id], top, 1.0f); };
  const auto weight = [&](int64_t id) -> Total { return shared::weight_of(shared::decay(z(id))); };
  const float log_sum = shared::log_mass(total_of(count, weight, s));
  if (wanted == 0) return log_sum;
  const auto rank = [&](int64_t id) { return shared::rank_of(z(id)); };
  Total before = 0;
  const uint32_t last =
      find_key(count, static_cast<Total>(wanted), rank, [](int64_t) -> Total { return 1; }, s, before);
  const auto tied = [&](int64_t id) -> Total { return rank(id) == last ? 1 : 0; };
  const Limit limit{last, find_id(count, static_cast<Total>(wanted) - before - 1, tied, s)};
  if (threadIdx.x == 0) s.listed = 0;
  __syncthreads();
  // Rank and id in one word, whose order is that of the list.
  for (int64_t id = threadIdx.x; id < count; id += kSelectThreads) {
    if (limit.keeps(rank(id), id)) s.bins[atomicAdd(&s.listed, 1u)] = static_cast<Total>(rank(id)) << 32 | id;
  }
  __syncthreads();
  for (int64_t i = threadIdx.x; i < wanted; i += kSelectThreads) {
    const Total own = s.bins[i];
    int64_t place = row * wanted;
    for (int64_t j = 0; j < wanted; ++j) place += s.bins[j] < own ? 1 : 0;
    a.top_ids[place] = static_cast<int64_t>(own & 0xffffffffu);
    a.top_values[place] = shared::subtract(shared::value_of_rank(static_cast<uint32_t>(own >> 32)), log_sum);
  }
  __syncthreads();
  return log_sum;
}

__device__ __forceinline__ void give_up(const SampleArguments& a, int64_t row) {
  if (threadIdx.x == 0) a.ids[row] = -1;
  if (threadIdx.x == 0 && a.top_logprobs >= 0) a.logprobs[row] = not_a_number();
  for (int64_t i = threadIdx.x; i < a.top_logprobs; i += kSelectThreads) {
    a.top_ids[row * a.top_logprobs + i] = -1;
    a.top_values[row * a.top_logprobs + i] = not_a_number();
  }
}

// Grid: one block a row.
template <class T>
__global__ void __launch_bounds__(kSelectThreads) sample_kernel(const T* __restrict__ logits, const SampleArguments a) {
  __shared__ SelectShared s;
  const int64_t row = blockIdx.x;
  const T* raw = logits + row * a.row_stride;
  float* x = a.scratch + row * a.vocabulary;
  const float raw_top = copy_row(raw, a.vocabulary, x, s);
  if (!(raw_top > -infinity()) || !parameters_valid(a, row)) return give_up(a, row);
  // Whether the adjusted row has an answer is not known yet; if not, what is listed here is taken back.
  const float log_sum = a.top_logprobs >= 0 ? raw_logprobs(a, row, x, raw_top, s) : 0.0f;
  const float top = adjust(a, row, x, raw_top, s);
  if (!(top > -infinity())) return give_up(a, row);
  const int64_t id = choose(a, row, x, top, s);
  if (threadIdx.x != 0) return;
  a.ids[row] = id;
  if (a.top_logprobs >= 0) a.logprobs[row] = shared::subtract(shared::subtract(widen(raw[id]), raw_top), log_sum);
}

}  // namespace pyruntime::cuda
