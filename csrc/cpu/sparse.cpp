// pool_sparse and lexical_weights: checks, threads, and the merging of repeated ids.
#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "../checks.h"
#include "dispatch.h"
#include "linear.h"

namespace pyruntime {
namespace {

void check_sequences(const Tensor& starts, int64_t rows) {
  check_starts(starts, "starts", rows);
  const int32_t* p = starts.const_data_ptr<int32_t>();
  for (int64_t s = 0; s + 1 < starts.size(0); ++s) require(p[s] < p[s + 1], "starts: sequence ", s, " has no rows");
}

Tensor pool_sparse(const Tensor hidden, const Tensor starts, const Tensor weight, const std::optional<Tensor> bias) {
  Product product = check_product(hidden, "hidden", weight, "weight", bias);
  check_sequences(starts, hidden.size(0));
  SparseArgs a{product.args, starts.const_data_ptr<int32_t>(), starts.size(0) - 1};
  const int64_t columns = a.linear.columns;
  Tensor out = empty_cpu({a.sequences, columns}, ScalarType::Float);
  a.linear.out = out.mutable_data_ptr();
  a.linear.out_row = columns;
  constexpr int64_t kChunk = 128;
  for_each_item(a.sequences == 0 ? 0 : (columns + kChunk - 1) / kChunk, [&] {
    return [&](int64_t i) { kernels().sparse(a, i * kChunk, std::min(columns, (i + 1) * kChunk)); };
  });
  return out;
}

// relu(hidden[t]·weight + bias) of every token t: one row against T columns.
std::vector<float> token_weights(const Tensor& hidden, const Tensor& weight, double bias) {
  const int64_t width = weight.size(0), tokens = hidden.size(0);
  LabelArgs a{};
  a.linear.dtype = check_floating(hidden, "hidden");
  a.linear.x = weight.const_data_ptr(), a.linear.w = hidden.const_data_ptr();
  a.linear.rows = 1, a.linear.columns = tokens, a.linear.depth = width;
  a.linear.x_row = width, a.linear.w_row = hidden.stride(0);
  std::vector<int64_t> all(static_cast<size_t>(tokens));
  std::iota(all.begin(), all.end(), 0);
  std::vector<float> out(all.size());
  const int32_t bounds[2] = {0, static_cast<int32_t>(tokens)};
  a.linear.out = out.data(), a.label_ids = all.data(), a.label_starts = bounds;
  kernels().labels(a, 0);
  for (float& value : out) {
    value += static_cast<float>(bias);
    if (value < 0.0f) value = 0.0f;
  }
  return out;
}

std::tuple<Tensor, Tensor, Tensor> lexical_weights(const Tensor hidden, const Tensor starts, const Tensor token_ids,
                                                   const Tensor weight, double bias, const Tensor skip) {
  check_floating(hidden, "hidden");
  check_shape(hidden, "hidden", {-1, -1});
  check_dense_rows(hidden, "hidden");
  require(hidden.size(1) >= 1, "hidden: rows must be at least one wide, got ", describe(hidden));
  const int64_t tokens = hidden.size(0), sequences = starts.dim() == 1 ? starts.size(0) - 1 : 0;
  check_sequences(starts, tokens);
  check_array(token_ids, "token_ids", ScalarType::Long, {tokens});
  check_same_dtype(weight, "weight", hidden, "hidden");
  check_array(weight, "weight", hidden.scalar_type(), {hidden.size(1)});
  check_array(skip, "skip", ScalarType::Long, {-1});
  require(bias == bias, "bias: must be a number");
  const int64_t* ids = token_ids.const_data_ptr<int64_t>();
  for (int64_t t = 0; t < tokens; ++t) require(ids[t] >= 0, "token_ids: entry ", t, " is negative: ", ids[t]);
  std::vector<int64_t> skipped(skip.const_data_ptr<int64_t>(), skip.const_data_ptr<int64_t>() + skip.size(0));
  std::sort(skipped.begin(), skipped.end());

  const std::vector<float> weights = token_weights(hidden, weight, bias);
  Tensor out_ids = empty_cpu({tokens}, ScalarType::Long), out_weights = empty_cpu({tokens}, ScalarType::Float);
  Tensor out_starts = empty_cpu({sequences + 1}, ScalarType::Int);
  int64_t* to_ids = out_ids.mutable_data_ptr<int64_t>();
  float* to_weights = out_weights.mutable_data_ptr<float>();
  int32_t* to_starts = out_starts.mutable_data_ptr<int32_t>();
  const int32_t* bounds = starts.const_data_ptr<int32_t>();
  int64_t used = to_starts[0] = 0;
  std::vector<std::pair<int64_t, float>> found;
  for (int64_t s = 0; s < sequences; ++s) {
    found.clear();
    for (int64_t t = bounds[s]; t < bounds[s + 1]; ++t) {
      // NaN is not zero: it stays, to be seen.
      if (weights[t] != 0.0f && !std::binary_search(skipped.begin(), skipped.end(), ids[t])) {
        found.emplace_back(ids[t], weights[t]);
      }
    }
    std::stable_sort(found.begin(), found.end(), [](const auto& x, const auto& y) { return x.first < y.first; });
    const int64_t begin = used;
    for (const auto& [id, value] : found) {
      if (used > begin && to_ids[used - 1] == id) {
        if (value > to_weights[used - 1] || value != value) to_weights[used - 1] = value;
        continue;
      }
      to_ids[used] = id, to_weights[used] = value, ++used;
    }
    to_starts[s + 1] = static_cast<int32_t>(used);
  }
  std::fill(to_ids + used, to_ids + tokens, -1);
  std::fill(to_weights + used, to_weights + tokens, 0.0f);
  return {out_ids, out_weights, out_starts};
}

std::tuple<Tensor, Tensor> delimiter_rows(const Tensor input_ids, const Tensor starts, int64_t delimiter) {
  check_array(input_ids, "input_ids", ScalarType::Long, {-1});
  const int64_t tokens = input_ids.size(0);
  check_starts(starts, "starts", tokens);
  Tensor rows = empty_cpu({tokens}, ScalarType::Long), out_starts = empty_cpu({starts.size(0)}, ScalarType::Int);
  const int64_t* ids = input_ids.const_data_ptr<int64_t>();
  const int32_t* bounds = starts.const_data_ptr<int32_t>();
  int64_t* to = rows.mutable_data_ptr<int64_t>();
  int32_t* to_starts = out_starts.mutable_data_ptr<int32_t>();
  int64_t used = to_starts[0] = 0;
  for (int64_t s = 0; s + 1 < starts.size(0); ++s) {
    bool first = true;
    for (int64_t t = bounds[s]; t < bounds[s + 1]; ++t) {
      if (ids[t] != delimiter) continue;
      if (!first) to[used++] = t - 1;
      first = false;
    }
    to_starts[s + 1] = static_cast<int32_t>(used);
  }
  std::fill(to + used, to + tokens, -1);
  return {rows, out_starts};
}

}  // namespace
}  // namespace pyruntime

STABLE_TORCH_LIBRARY_IMPL(pyruntime, CPU, m) {
  m.impl("pool_sparse", TORCH_BOX(&pyruntime::pool_sparse));
  m.impl("lexical_weights", TORCH_BOX(&pyruntime::lexical_weights));
  m.impl("delimiter_rows", TORCH_BOX(&pyruntime::delimiter_rows));
}
