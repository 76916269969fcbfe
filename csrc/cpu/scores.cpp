// label_logits and logsumexp: checks, tiles, threads.
#include <cmath>
#include <limits>
#include <vector>

#include "../checks.h"
#include "dispatch.h"
#include "linear.h"

namespace pyruntime {
namespace {

Tensor label_logits(const Tensor rows, const Tensor weight, const std::optional<Tensor> bias, const Tensor label_ids,
                    const Tensor label_starts) {
  Product product = check_product(rows, "rows", weight, "weight", bias);
  check_array(label_ids, "label_ids", ScalarType::Long, {-1});
  check_starts(label_starts, "label_starts", label_ids.size(0));
  check_shape(label_starts, "label_starts", {product.args.rows + 1});
  LabelArgs a{product.args, label_ids.const_data_ptr<int64_t>(), label_starts.const_data_ptr<int32_t>()};
  for (int64_t i = 0; i < label_ids.size(0); ++i) {
    require(a.label_ids[i] >= 0 && a.label_ids[i] < a.linear.columns, "label_ids: entry ", i, " is ", a.label_ids[i],
            ", outside the ", a.linear.columns, " rows of weight");
  }
  Tensor out = empty_cpu({label_ids.size(0)}, ScalarType::Float);
  a.linear.out = out.mutable_data_ptr();
  for_each_item(a.linear.rows, [&] { return [&](int64_t row) { kernels().labels(a, row); }; });
  return out;
}

// The partial pairs of every tile, in tile order: the sum has one order whatever the threads did.
float combine(const float* maxima, const float* sums, int64_t tiles, int64_t stride) {
  float top = -std::numeric_limits<float>::infinity();
  for (int64_t t = 0; t < tiles; ++t) {
    for (int64_t i = 0; i < 16; ++i) {
      const float m = maxima[t * stride + i];
      if (m > top || std::isnan(m)) top = m;
    }
  }
  if (std::isinf(top) && top < 0) return top;
  double total = 0;
  for (int64_t t = 0; t < tiles; ++t) {
    for (int64_t i = 0; i < 16; ++i) {
      total += static_cast<double>(sums[t * stride + i]) * std::exp(static_cast<double>(maxima[t * stride + i]) - top);
    }
  }
  return static_cast<float>(static_cast<double>(top) + std::log(total));
}

Tensor logsumexp(const Tensor rows, const Tensor weight, const std::optional<Tensor> bias, double softcap,
                 double scale) {
  Product product = check_product(rows, "rows", weight, "weight", bias);
  require(softcap >= 0.0, "softcap: must be 0 (off) or positive, got ", softcap);
  require(std::isfinite(scale), "scale: must be finite, got ", scale);
  const LogSumExpArgs a{product.args, static_cast<float>(softcap), static_cast<float>(scale)};
  const int64_t count = a.linear.rows, columns = a.linear.columns;
  require(columns >= 1, "weight: needs at least one row, got ", describe(weight));
  Tensor out = empty_cpu({count}, ScalarType::Float);
  constexpr int64_t kTile = 2048;
  const int64_t tiles = (columns + kTile - 1) / kTile, stride = count * 16;
  std::vector<float> maxima(static_cast<size_t>(tiles * stride)), sums(maxima.size());
  for_each_item(count == 0 ? 0 : tiles, [&] {
    return [&](int64_t t) {
      kernels().logsumexp(a, t * kTile, std::min(columns, (t + 1) * kTile), maxima.data() + t * stride,
                          sums.data() + t * stride);
    };
  });
  float* result = out.mutable_data_ptr<float>();
  for (int64_t r = 0; r < count; ++r) result[r] = combine(maxima.data() + r * 16, sums.data() + r * 16, tiles, stride);
  return out;
}

}  // namespace
}  // namespace pyruntime

STABLE_TORCH_LIBRARY_IMPL(pyruntime, CPU, m) {
  m.impl("label_logits", TORCH_BOX(&pyruntime::label_logits));
  m.impl("logsumexp", TORCH_BOX(&pyruntime::logsumexp));
}
