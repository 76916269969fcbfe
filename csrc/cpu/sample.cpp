// sample: checks, one row an item.
#include "../checks.h"
#include "dispatch.h"

namespace pyruntime {
namespace {

void check_ranges(const SampleArgs& a, int64_t rows) {
  for (int64_t i = 0; i < rows; ++i) {
    // Written so that NaN fails.
    require(a.temperature[i] >= 0.0f, "temperature: entry ", i, " is ", a.temperature[i], ", expected 0 or more");
    require(a.top_p[i] > 0.0f && a.top_p[i] <= 1.0f, "top_p: entry ", i, " is ", a.top_p[i], ", expected (0, 1]");
    require(a.min_p[i] >= 0.0f && a.min_p[i] <= 1.0f, "min_p: entry ", i, " is ", a.min_p[i], ", expected [0, 1]");
  }
}

Tensor sample(const Tensor logits, const Tensor temperature, const Tensor top_k, const Tensor top_p, const Tensor min_p,
              const Tensor seeds, const Tensor positions, const Tensor indices) {
  SampleArgs a{};
  a.dtype = check_floating(logits, "logits");
  check_shape(logits, "logits", {-1, -1});
  check_dense_rows(logits, "logits");
  const int64_t rows = logits.size(0);
  a.logits = logits.const_data_ptr();
  a.row_stride = logits.stride(0), a.vocabulary = logits.size(1);
  require(a.vocabulary >= 1 && a.vocabulary <= INT32_MAX, "logits: expected 1 to 2^31 - 1 columns, got ",
          describe(logits));
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
  check_ranges(a, rows);
  Tensor out = empty_cpu({rows}, ScalarType::Long);
  a.out = out.mutable_data_ptr<int64_t>();
  for_each_item(rows, [&] {
    return [&, scratch = std::make_shared<Scratch>(3 * a.vocabulary)](int64_t row) {
      kernels().sample(a, row, scratch->get());
    };
  });
  return out;
}

}  // namespace
}  // namespace pyruntime

STABLE_TORCH_LIBRARY_IMPL(pyruntime, CPU, m) { m.impl("sample", TORCH_BOX(&pyruntime::sample)); }
