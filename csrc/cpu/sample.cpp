// sample: checks, one row an item.
#include "../checks.h"
#include "../shared/sampling_math.h"
#include "dispatch.h"

namespace pyruntime {
namespace {

using Optional = std::optional<Tensor>;

void check_ranges(const SampleArgs& a, int64_t rows) {
  for (int64_t i = 0; i < rows; ++i) {
    // Written so that NaN fails.
    require(a.temperature[i] >= 0.0f && a.temperature[i] <= 3.4e38f, "temperature: entry ", i, " is ", a.temperature[i],
            ", expected 0 or more, finite");
    require(a.top_p[i] > 0.0f && a.top_p[i] <= 1.0f, "top_p: entry ", i, " is ", a.top_p[i], ", expected (0, 1]");
    require(a.min_p[i] >= 0.0f && a.min_p[i] <= 1.0f, "min_p: entry ", i, " is ", a.min_p[i], ", expected [0, 1]");
    if (a.repetition != nullptr) {
      require(a.repetition[i] > 0.0f && a.repetition[i] <= 3.4e38f, "repetition: entry ", i, " is ", a.repetition[i],
              ", expected more than 0, finite");
    }
    for (const auto& [values, name] : {std::pair{a.frequency, "frequency"}, std::pair{a.presence, "presence"}}) {
      if (values == nullptr) continue;
      require(values[i] >= -3.4e38f && values[i] <= 3.4e38f, name, ": entry ", i, " is ", values[i],
              ", expected a finite number");
    }
  }
}

// Ids of each row strictly ascending and within the vocabulary.
void check_ids(const int64_t* ids, const int32_t* starts, const char* name, int64_t rows, int64_t vocabulary) {
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t i = starts[row]; i < starts[row + 1]; ++i) {
      require(ids[i] >= 0 && ids[i] < vocabulary, name, ": entry ", i, " is ", ids[i], ", outside the vocabulary of ",
              vocabulary);
      require(i == starts[row] || ids[i - 1] < ids[i], name, ": entry ", i, " is ", ids[i], " after ", ids[i - 1],
              " in one row, expected ascending ids");
    }
  }
}

void check_together(const Optional& ids, const Optional& values, const Optional& starts, const char* ids_name,
                    const char* values_name, const char* starts_name) {
  require(ids.has_value() == values.has_value() && ids.has_value() == starts.has_value(), ids_name, ", ", values_name,
          ", ", starts_name, ": expected all of them or none");
}

void set_seen(SampleArgs& a, int64_t rows, const Optional& repetition, const Optional& frequency,
              const Optional& presence, const Optional& ids, const Optional& generated, const Optional& starts) {
  const auto per_row = [&](const Optional& t, const char* name) -> const float* {
    if (!t.has_value()) return nullptr;
    check_array(*t, name, ScalarType::Float, {rows});
    return t->const_data_ptr<float>();
  };
  a.repetition = per_row(repetition, "repetition");
  a.frequency = per_row(frequency, "frequency");
  a.presence = per_row(presence, "presence");
  check_together(ids, generated, starts, "seen_ids", "seen_generated", "seen_starts");
  if (!ids.has_value()) return;
  check_array(*ids, "seen_ids", ScalarType::Long, {-1});
  check_array(*generated, "seen_generated", ScalarType::Int, {ids->size(0)});
  check_starts(*starts, "seen_starts", ids->size(0));
  check_shape(*starts, "seen_starts", {rows + 1});
  a.seen_ids = ids->const_data_ptr<int64_t>();
  a.seen_generated = generated->const_data_ptr<int32_t>();
  a.seen_starts = starts->const_data_ptr<int32_t>();
  check_ids(a.seen_ids, a.seen_starts, "seen_ids", rows, a.vocabulary);
  for (int64_t i = 0; i < ids->size(0); ++i) {
    require(a.seen_generated[i] >= 0, "seen_generated: entry ", i, " is ", a.seen_generated[i], ", expected 0 or more");
  }
}

void set_bias(SampleArgs& a, int64_t rows, const Optional& ids, const Optional& values, const Optional& starts) {
  check_together(ids, values, starts, "bias_ids", "bias_values", "bias_starts");
  if (!ids.has_value()) return;
  check_array(*ids, "bias_ids", ScalarType::Long, {-1});
  check_array(*values, "bias_values", ScalarType::Float, {ids->size(0)});
  check_starts(*starts, "bias_starts", ids->size(0));
  check_shape(*starts, "bias_starts", {rows + 1});
  a.bias_ids = ids->const_data_ptr<int64_t>();
  a.bias_values = values->const_data_ptr<float>();
  a.bias_starts = starts->const_data_ptr<int32_t>();
  check_ids(a.bias_ids, a.bias_starts, "bias_ids", rows, a.vocabulary);
  for (int64_t i = 0; i < ids->size(0); ++i) {
    require(a.bias_values[i] <= 3.4e38f, "bias_values: entry ", i, " is ", a.bias_values[i],
            ", expected a finite number or -inf");
  }
}

void set_bitmask(SampleArgs& a, int64_t rows, const Optional& bitmask) {
  if (!bitmask.has_value()) return;
  const int64_t words = (a.vocabulary + 31) / 32;
  check_array(*bitmask, "bitmask", ScalarType::Int, {rows, words});
  a.bitmask = reinterpret_cast<const uint32_t*>(bitmask->const_data_ptr<int32_t>());
  a.bitmask_stride = words;
}

void set_rows(SampleArgs& a, const Tensor& logits, const Tensor& temperature, const Tensor& top_k, const Tensor& top_p,
              const Tensor& min_p, const Tensor& seeds, const Tensor& positions, const Tensor& indices) {
  a.dtype = check_floating(logits, "logits");
  check_shape(logits, "logits", {-1, -1});
  check_dense_rows(logits, "logits");
  const int64_t rows = logits.size(0);
  a.logits = logits.const_data_ptr();
  a.row_stride = logits.stride(0), a.vocabulary = logits.size(1);
  require(a.vocabulary >= 1 && a.vocabulary <= shared::kMaxVocabulary, "logits: expected 1 to ", shared::kMaxVocabulary,
          " columns, got ", describe(logits));
  check_array(temperature, "temperature", ScalarType::Float, {rows});
  check_array(top_k, "top_k", ScalarType::Int, {rows});
  check_array(top_p, "top_p", ScalarType::Float, {rows});
  check_array(min_p, "min_p", ScalarType::Float, {rows});
  check_array(seeds, "seeds", ScalarType::Long, {rows});
  check_array(positions, "positions", ScalarType::Long, {rows});
  check_array(indices, "indices", ScalarType::Int, {rows});
  a.temperature = temperature.const_data_ptr<float>();
  a.top_k = top_k.const_data_ptr<int32_t>();
  a.top_p = top_p.const_data_ptr<float>();
  a.min_p = min_p.const_data_ptr<float>();
  a.seeds = seeds.const_data_ptr<int64_t>();
  a.positions = positions.const_data_ptr<int64_t>();
  a.indices = indices.const_data_ptr<int32_t>();
}

std::tuple<Tensor, Tensor, Tensor, Tensor> sample(
    const Tensor logits, const Tensor temperature, const Tensor top_k, const Tensor top_p, const Tensor min_p,
    const Tensor seeds, const Tensor positions, const Tensor indices, const Optional repetition,
    const Optional frequency, const Optional presence, const Optional seen_ids, const Optional seen_generated,
    const Optional seen_starts, const Optional bias_ids, const Optional bias_values, const Optional bias_starts,
    const Optional bitmask, int64_t top_logprobs) {
  SampleArgs a{};
  set_rows(a, logits, temperature, top_k, top_p, min_p, seeds, positions, indices);
  const int64_t rows = logits.size(0);
  set_seen(a, rows, repetition, frequency, presence, seen_ids, seen_generated, seen_starts);
  set_bias(a, rows, bias_ids, bias_values, bias_starts);
  set_bitmask(a, rows, bitmask);
  check_ranges(a, rows);
  const int64_t most = std::min(a.vocabulary, shared::kMaxTopLogprobs);
  require(top_logprobs >= -1 && top_logprobs <= most, "top_logprobs: expected -1 to ", most, ", got ", top_logprobs);
  a.top_logprobs = top_logprobs;
  const int64_t listed = std::max<int64_t>(top_logprobs, 0);
  Tensor ids = empty_cpu({rows}, ScalarType::Long), top_ids = empty_cpu({rows, listed}, ScalarType::Long);
  Tensor logprobs = empty_cpu({top_logprobs < 0 ? 0 : rows}, ScalarType::Float);
  Tensor top_values = empty_cpu({rows, listed}, ScalarType::Float);
  a.ids = ids.mutable_data_ptr<int64_t>();
  a.logprobs = logprobs.mutable_data_ptr<float>();
  a.top_ids = top_ids.mutable_data_ptr<int64_t>();
  a.top_values = top_values.mutable_data_ptr<float>();
  for_each_item(rows, [&] {
    return [&, scratch = std::make_shared<Scratch>(kernels().sample_scratch(a.vocabulary))](int64_t row) {
      kernels().sample(a, row, scratch->get());
    };
  });
  return {ids, logprobs, top_ids, top_values};
}

}  // namespace
}  // namespace pyruntime

STABLE_TORCH_LIBRARY_IMPL(pyruntime, CPU, m) { m.impl("sample", TORCH_BOX(&pyruntime::sample)); }
