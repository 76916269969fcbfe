// Label logits, scores and probabilities, token logprobs, log-sum-exp: checks, tiles, threads.
#include <cmath>
#include <limits>
#include <vector>

#include "../checks.h"
#include "dispatch.h"
#include "linear.h"
#include "scalars.h"

namespace pyruntime {
namespace {

// What turns a raw product into a logit: softcap * tanh(scale * raw / softcap), softcap 0: off.
struct Shaping {
  Shaping(double softcap_in, double scale_in) : softcap(check_softcap(softcap_in)), scale(check_scale(scale_in)) {}
  float operator()(float raw) const {
    const float scaled = raw * scale;
    return softcap == 0.0f ? scaled : std::tanh(scaled / softcap) * softcap;
  }
  float softcap, scale;
};

// Of row r: ids[starts[r]] to ids[starts[r + 1]], each a row of the matrix.
struct Labels {
  Labels(const Product& product, const Tensor& label_ids, const Tensor& label_starts) {
    check_array(label_ids, "label_ids", ScalarType::Long, {-1});
    count = label_ids.size(0);
    check_starts(label_starts, "label_starts", count);
    check_shape(label_starts, "label_starts", {product.args.rows + 1});
    ids = label_ids.const_data_ptr<int64_t>();
    starts = label_starts.const_data_ptr<int32_t>();
    check(product, "label_ids");
  }
  // One id a row.
  Labels(const Product& product, const Tensor& token_ids) {
    check_array(token_ids, "token_ids", ScalarType::Long, {product.args.rows});
    count = token_ids.size(0);
    ids = token_ids.const_data_ptr<int64_t>();
    for (int64_t i = 0; i <= count; ++i) own_starts.push_back(static_cast<int32_t>(i));
    starts = own_starts.data();
    check(product, "token_ids");
  }
  void check(const Product& product, const char* name) const {
    for (int64_t i = 0; i < count; ++i) {
      require(ids[i] >= 0 && ids[i] < product.args.columns, name, ": entry ", i, " is ", ids[i], ", outside the ",
              product.args.columns, " rows of weight");
    }
  }
  const int64_t* ids;
  const int32_t* starts;
  int64_t count;
  std::vector<int32_t> own_starts;
};

Tensor raw_logits(const Product& product, const Labels& labels) {
  Tensor out = empty_cpu({labels.count}, ScalarType::Float);
  LabelArgs a{product.args, labels.ids, labels.starts};
  a.linear.out = out.mutable_data_ptr();
  // Work that is over before a second thread has woken up is not shared.
  constexpr int64_t kSmall = 1 << 16;
  if (labels.count * a.linear.depth <= kSmall) {
    for (int64_t row = 0; row < a.linear.rows; ++row) kernels().labels(a, row);
    return out;
  }
  for_each_item(a.linear.rows, [&] { return [&](int64_t row) { kernels().labels(a, row); }; });
  return out;
}

Tensor label_logits(const Tensor rows, const Tensor weight, const std::optional<Tensor> bias, const Tensor label_ids,
                    const Tensor label_starts) {
  const Product product = check_product(rows, "rows", weight, "weight", bias);
  return raw_logits(product, Labels(product, label_ids, label_starts));
}

void soften(float* values, int64_t count, const Shaping& shape, float temperature) {
  float top = -std::numeric_limits<float>::infinity();
  for (int64_t i = 0; i < count; ++i) {
    values[i] = shape(values[i]);
    top = std::max(top, values[i]);
  }
  double total = 0;
  for (int64_t i = 0; i < count; ++i) {
    // Below the maximum first: a quotient of a tiny temperature would overflow. In double no difference does either.
    const double below = (static_cast<double>(values[i]) - top) / temperature;
    total += values[i] = std::exp(static_cast<float>(below));
  }
  for (int64_t i = 0; i < count; ++i) values[i] = static_cast<float>(values[i] / total);
}

Tensor label_scores(const Tensor rows, const Tensor weight, const std::optional<Tensor> bias, const Tensor label_ids,
                    const Tensor label_starts, const Tensor temperature, double softcap, double scale) {
  const Product product = check_product(rows, "rows", weight, "weight", bias);
  const Labels labels(product, label_ids, label_starts);
  const Shaping shape(softcap, scale);
  check_array(temperature, "temperature", ScalarType::Float, {product.args.rows});
  const float* temperatures = temperature.const_data_ptr<float>();
  for (int64_t r = 0; r < product.args.rows; ++r) {
    require(temperatures[r] > 0.0f && std::isfinite(temperatures[r]), "temperature: entry ", r, " is ", temperatures[r],
            ", expected more than 0, finite");
  }
  Tensor out = raw_logits(product, labels);
  float* values = out.mutable_data_ptr<float>();
  for (int64_t r = 0; r < product.args.rows; ++r) {
    soften(values + labels.starts[r], labels.starts[r + 1] - labels.starts[r], shape, temperatures[r]);
  }
  return out;
}

// Σ exp(logit) = e^top * e^log_sum. Apart, they keep what a sum in float32 would lose beside a large maximum.
struct Total {
  float top;
  double log_sum;
};

// The partial pairs of every tile, in tile order: the sum has one order whatever the threads did.
Total combine(const float* maxima, const float* sums, int64_t tiles, int64_t stride) {
  float top = -std::numeric_limits<float>::infinity();
  for (int64_t t = 0; t < tiles; ++t) {
    for (int64_t i = 0; i < 16; ++i) {
      const float m = maxima[t * stride + i];
      if (m > top || std::isnan(m)) top = m;
    }
  }
  if (std::isinf(top) && top < 0) return {top, 0.0};
  double total = 0;
  for (int64_t t = 0; t < tiles; ++t) {
    for (int64_t i = 0; i < 16; ++i) {
      total += static_cast<double>(sums[t * stride + i]) * std::exp(static_cast<double>(maxima[t * stride + i]) - top);
    }
  }
  return {top, std::log(total)};
}

std::vector<Total> stream(const Product& product, const Shaping& shape) {
  const LogSumExpArgs a{product.args, shape.softcap, shape.scale};
  const int64_t count = a.linear.rows, columns = a.linear.columns;
  require(columns >= 1, "weight: needs at least one row");
  constexpr int64_t kTile = 2048;
  const int64_t tiles = (columns + kTile - 1) / kTile, stride = count * 16;
  std::vector<float> maxima(static_cast<size_t>(tiles * stride)), sums(maxima.size());
  for_each_item(count == 0 ? 0 : tiles, [&] {
    return [&](int64_t t) {
      kernels().logsumexp(a, t * kTile, std::min(columns, (t + 1) * kTile), maxima.data() + t * stride,
                          sums.data() + t * stride);
    };
  });
  std::vector<Total> totals;
  for (int64_t r = 0; r < count; ++r) {
    totals.push_back(combine(maxima.data() + r * 16, sums.data() + r * 16, tiles, stride));
  }
  return totals;
}

Tensor logsumexp(const Tensor rows, const Tensor weight, const std::optional<Tensor> bias, double softcap,
                 double scale) {
  const Product product = check_product(rows, "rows", weight, "weight", bias);
  const std::vector<Total> totals = stream(product, Shaping(softcap, scale));
  Tensor out = empty_cpu({product.args.rows}, ScalarType::Float);
  float* result = out.mutable_data_ptr<float>();
  for (const Total& total : totals) *result++ = static_cast<float>(static_cast<double>(total.top) + total.log_sum);
  return out;
}

// log-softmax over the whole vocabulary at the labels.
Tensor logprobs(const Product& product, const Labels& labels, const Shaping& shape) {
  Tensor out = raw_logits(product, labels);
  const std::vector<Total> totals = stream(product, shape);
  float* values = out.mutable_data_ptr<float>();
  for (int64_t r = 0; r < product.args.rows; ++r) {
    for (int64_t i = labels.starts[r]; i < labels.starts[r + 1]; ++i) {
      const float value = static_cast<float>(shape(values[i]) - totals[r].top - totals[r].log_sum);
      values[i] = value > 0.0f ? 0.0f : value;  // rounding alone can lift it above; NaN stays
    }
  }
  return out;
}

Tensor label_probabilities(const Tensor rows, const Tensor weight, const std::optional<Tensor> bias,
                           const Tensor label_ids, const Tensor label_starts, double softcap, double scale) {
  const Product product = check_product(rows, "rows", weight, "weight", bias);
  Tensor out = logprobs(product, Labels(product, label_ids, label_starts), Shaping(softcap, scale));
  float* values = out.mutable_data_ptr<float>();
  for (int64_t i = 0; i < label_ids.size(0); ++i) values[i] = std::exp(values[i]);
  return out;
}

Tensor token_logprobs(const Tensor rows, const Tensor weight, const std::optional<Tensor> bias, const Tensor token_ids,
                      double softcap, double scale) {
  const Product product = check_product(rows, "rows", weight, "weight", bias);
  return logprobs(product, Labels(product, token_ids), Shaping(softcap, scale));
}

}  // namespace
}  // namespace pyruntime

STABLE_TORCH_LIBRARY_IMPL(pyruntime, CPU, m) {
  m.impl("label_logits", TORCH_BOX(&pyruntime::label_logits));
  m.impl("label_scores", TORCH_BOX(&pyruntime::label_scores));
  m.impl("label_probabilities", TORCH_BOX(&pyruntime::label_probabilities));
  m.impl("token_logprobs", TORCH_BOX(&pyruntime::token_logprobs));
  m.impl("logsumexp", TORCH_BOX(&pyruntime::logsumexp));
}
