// sample on CUDA.
#include "sample.cuh"

#include <algorithm>

#include "launch.h"

namespace pyruntime::cuda {
namespace {

void check_together(const Optional& ids, const Optional& values, const Optional& starts, const char* names) {
  require(ids.has_value() == values.has_value() && ids.has_value() == starts.has_value(), names,
          ": expected all of them or none");
}

void set_rows(SampleArguments& a, const Tensor& logits, const Tensor& temperature, const Tensor& top_k,
              const Tensor& top_p, const Tensor& min_p, const Tensor& seeds, const Tensor& positions,
              const Tensor& indices) {
  check_matrix(logits, "logits");
  const int64_t rows = logits.size(0);
  a.row_stride = logits.stride(0), a.vocabulary = logits.size(1);
  require(a.vocabulary >= 1 && a.vocabulary <= shared::kMaxVocabulary, "logits: expected 1 to ", shared::kMaxVocabulary,
          " columns, got ", describe(logits));
  check_device_array(temperature, "temperature", logits, ScalarType::Float, {rows});
  check_device_array(top_k, "top_k", logits, ScalarType::Int, {rows});
  check_device_array(top_p, "top_p", logits, ScalarType::Float, {rows});
  check_device_array(min_p, "min_p", logits, ScalarType::Float, {rows});
  check_device_array(seeds, "seeds", logits, ScalarType::Long, {rows});
  check_device_array(positions, "positions", logits, ScalarType::Long, {rows});
  check_device_array(indices, "indices", logits, ScalarType::Int, {rows});
  a.temperature = temperature.const_data_ptr<float>();
  a.top_k = top_k.const_data_ptr<int32_t>();
  a.top_p = top_p.const_data_ptr<float>();
  a.min_p = min_p.const_data_ptr<float>();
  a.seeds = seeds.const_data_ptr<int64_t>();
  a.positions = positions.const_data_ptr<int64_t>();
  a.indices = indices.const_data_ptr<int32_t>();
}

const float* row_values(const Optional& t, const char* name, const Tensor& logits) {
  if (t.has_value()) check_device_array(*t, name, logits, ScalarType::Float, {logits.size(0)});
  return optional_data<float>(t);
}

void set_seen(SampleArguments& a, const Tensor& logits, const Optional& ids, const Optional& generated,
              const Optional& starts) {
  check_together(ids, generated, starts, "seen_ids, seen_generated, seen_starts");
  if (!ids.has_value()) return;
  check_device_array(*ids, "seen_ids", logits, ScalarType::Long, {-1});
  check_device_array(*generated, "seen_generated", logits, ScalarType::Int, {ids->size(0)});
  check_device_array(*starts, "seen_starts", logits, ScalarType::Int, {logits.size(0) + 1});
  a.seen_ids = ids->const_data_ptr<int64_t>(), a.seen_generated = generated->const_data_ptr<int32_t>();
  a.seen_starts = starts->const_data_ptr<int32_t>(), a.seen = ids->size(0);
}

void set_bias(SampleArguments& a, const Tensor& logits, const Optional& ids, const Optional& values,
              const Optional& starts) {
  check_together(ids, values, starts, "bias_ids, bias_values, bias_starts");
  if (!ids.has_value()) return;
  check_device_array(*ids, "bias_ids", logits, ScalarType::Long, {-1});
  check_device_array(*values, "bias_values", logits, ScalarType::Float, {ids->size(0)});
  check_device_array(*starts, "bias_starts", logits, ScalarType::Int, {logits.size(0) + 1});
  a.bias_ids = ids->const_data_ptr<int64_t>(), a.bias_values = values->const_data_ptr<float>();
  a.bias_starts = starts->const_data_ptr<int32_t>(), a.biased = ids->size(0);
}

void set_bitmask(SampleArguments& a, const Tensor& logits, const Optional& bitmask) {
  if (!bitmask.has_value()) return;
  a.bitmask_stride = (a.vocabulary + 31) / 32;
  check_device_array(*bitmask, "bitmask", logits, ScalarType::Int, {logits.size(0), a.bitmask_stride});
  a.bitmask = reinterpret_cast<const uint32_t*>(bitmask->const_data_ptr<int32_t>());
}

std::tuple<Tensor, Tensor, Tensor, Tensor> sample(
    const Tensor logits, const Tensor temperature, const Tensor top_k, const Tensor top_p, const Tensor min_p,
    const Tensor seeds, const Tensor positions, const Tensor indices, const Optional repetition,
    const Optional frequency, const Optional presence, const Optional seen_ids, const Optional seen_generated,
    const Optional seen_starts, const Optional bias_ids, const Optional bias_values, const Optional bias_starts,
    const Optional bitmask, int64_t top_logprobs) {
  SampleArguments a{};
  set_rows(a, logits, temperature, top_k, top_p, min_p, seeds, positions, indices);
  a.repetition = row_values(repetition, "repetition", logits);
  a.frequency = row_values(frequency, "frequency", logits);
  a.presence = row_values(presence, "presence", logits);
  set_seen(a, logits, seen_ids, seen_generated, seen_starts);
  set_bias(a, logits, bias_ids, bias_values, bias_starts);
  set_bitmask(a, logits, bitmask);
  const int64_t rows = logits.size(0), most = std::min(a.vocabulary, kMaxListed);
  require(top_logprobs >= -1 && top_logprobs <= most, "top_logprobs: expected -1 to ", most, ", got ", top_logprobs);
  a.top_logprobs = top_logprobs;

  const torch::stable::accelerator::DeviceGuard guard(logits.get_device_index());
  const int64_t listed = std::max<int64_t>(top_logprobs, 0);
  Tensor ids = empty_beside(logits, {rows}, ScalarType::Long);
  Tensor logprobs = empty_beside(logits, {top_logprobs < 0 ? 0 : rows}, ScalarType::Float);
  Tensor top_ids = empty_beside(logits, {rows, listed}, ScalarType::Long);
  Tensor top_values = empty_beside(logits, {rows, listed}, ScalarType::Float);
  if (rows == 0) return {ids, logprobs, top_ids, top_values};
  Tensor scratch = empty_beside(logits, {rows, a.vocabulary}, ScalarType::Float);
  a.scratch = scratch.mutable_data_ptr<float>();
  a.ids = ids.mutable_data_ptr<int64_t>();
  a.logprobs = logprobs.mutable_data_ptr<float>();
  a.top_ids = top_ids.mutable_data_ptr<int64_t>();
  a.top_values = top_values.mutable_data_ptr<float>();
  dispatch(logits, [&](auto element) {
    using T = decltype(element);
    sample_kernel<T><<<blocks_of(rows), kSelectThreads, 0, current_stream(logits)>>>(
        static_cast<const T*>(logits.const_data_ptr()), a);
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return {ids, logprobs, top_ids, top_values};
}

}  // namespace
}  // namespace pyruntime::cuda

STABLE_TORCH_LIBRARY_IMPL(pyruntime, CUDA, m) { m.impl("sample", TORCH_BOX(&pyruntime::cuda::sample)); }
