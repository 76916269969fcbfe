// label_logits, label_scores, label_probabilities, token_logprobs and logsumexp on CUDA.
#include "product.h"
#include "scores.cuh"

namespace pyruntime::cuda {
namespace {

// Few rows leave most of a tall tile idle; the sums are the same bits in both.
constexpr int64_t kFewRows = 16;

struct Labels {
  const Tensor& ids;
  const Tensor* starts;
};

LabelArguments label_arguments(const Labels& labels, Tensor& out) {
  return {labels.ids.const_data_ptr<int64_t>(),
          labels.starts == nullptr ? nullptr : labels.starts->const_data_ptr<int32_t>(), labels.ids.size(0),
          out.mutable_data_ptr<float>()};
}

void check_labels(const Tensor& rows, const Tensor& label_ids, const Tensor& label_starts) {
  check_device_array(label_ids, "label_ids", rows, ScalarType::Long, {-1});
  check_device_array(label_starts, "label_starts", rows, ScalarType::Int, {rows.size(0) + 1});
}

Tensor run_labels(const Tensor& rows, const Tensor& weight, const Optional& bias, const Labels& labels,
                  const Tensor* temperature, double softcap, double scale) {
  const torch::stable::accelerator::DeviceGuard guard(rows.get_device_index());
  Tensor out = empty_beside(rows, {labels.ids.size(0)}, ScalarType::Float);
  if (rows.size(0) == 0 || labels.ids.size(0) == 0) return out;
  dispatch(rows, [&](auto element) {
    using T = decltype(element);
    label_kernel<T><<<blocks_of(rows.size(0)), kLabelThreads, 0, current_stream(rows)>>>(
        product_arguments<T>(rows, weight, bias, softcap, scale), label_arguments(labels, out),
        temperature == nullptr ? nullptr : temperature->const_data_ptr<float>());
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return out;
}

Tensor label_logits(const Tensor rows, const Tensor weight, const Optional bias, const Tensor label_ids,
                    const Tensor label_starts) {
  check_product(rows, "rows", weight, bias);
  check_labels(rows, label_ids, label_starts);
  return run_labels(rows, weight, bias, {label_ids, &label_starts}, nullptr, 0.0, 1.0);
}

Tensor label_scores(const Tensor rows, const Tensor weight, const Optional bias, const Tensor label_ids,
                    const Tensor label_starts, const Tensor temperature, double softcap, double scale) {
  check_product(rows, "rows", weight, bias, softcap, scale);
  check_labels(rows, label_ids, label_starts);
  check_device_array(temperature, "temperature", rows, ScalarType::Float, {rows.size(0)});
  return run_labels(rows, weight, bias, {label_ids, &label_starts}, &temperature, softcap, scale);
}

// The stream over the vocabulary; `out` has one entry a row, or a label.
template <class T>
void stream(const ProductArguments<T>& a, const LabelArguments& labels, Answer answer, const Tensor& workspace,
            cudaStream_t cuda_stream) {
  const unsigned tiles = blocks_of(a.columns, kTileColumns);
  auto* maxima = static_cast<float*>(workspace.mutable_data_ptr());
  float* sums = maxima + int64_t{tiles} * a.rows;
  if (a.rows <= kFewRows) {
    const dim3 grid(tiles, blocks_along_y(a.rows, 8));
    logsumexp_kernel<T, 8><<<grid, kProductThreads, 0, cuda_stream>>>(a, maxima, sums);
  } else {
    const dim3 grid(tiles, blocks_along_y(a.rows, 64));
    logsumexp_kernel<T, 64><<<grid, kProductThreads, 0, cuda_stream>>>(a, maxima, sums);
  }
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  combine_kernel<T><<<blocks_of(a.rows), kLabelThreads, 0, cuda_stream>>>(a, labels, maxima, sums, tiles, answer);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

Tensor run_stream(const Tensor& rows, const Tensor& weight, const Optional& bias, const Labels* labels, double softcap,
                  double scale, Answer answer) {
  require(weight.size(0) >= 1, "weight: needs at least one row, got ", describe(weight));
  const torch::stable::accelerator::DeviceGuard guard(rows.get_device_index());
  Tensor out = empty_beside(rows, {labels == nullptr ? rows.size(0) : labels->ids.size(0)}, ScalarType::Float);
  if (rows.size(0) == 0 || out.size(0) == 0) return out;
  const int64_t tiles = blocks_of(weight.size(0), kTileColumns);
  const Tensor workspace = empty_beside(rows, {2, tiles, rows.size(0)}, ScalarType::Float);
  const LabelArguments arguments = labels == nullptr
                                       ? LabelArguments{nullptr, nullptr, 0, out.mutable_data_ptr<float>()}
                                       : label_arguments(*labels, out);
  dispatch(rows, [&](auto element) {
    using T = decltype(element);
    stream<T>(product_arguments<T>(rows, weight, bias, softcap, scale), arguments, answer, workspace,
              current_stream(rows));
  });
  return out;
}

Tensor logsumexp(const Tensor rows, const Tensor weight, const Optional bias, double softcap, double scale) {
  check_product(rows, "rows", weight, bias, softcap, scale);
  return run_stream(rows, weight, bias, nullptr, softcap, scale, Answer::kLogSumExp);
}

Tensor label_probabilities(const Tensor rows, const Tensor weight, const Optional bias, const Tensor label_ids,
                           const Tensor label_starts, double softcap, double scale) {
  check_product(rows, "rows", weight, bias, softcap, scale);
  check_labels(rows, label_ids, label_starts);
  const Labels labels{label_ids, &label_starts};
  return run_stream(rows, weight, bias, &labels, softcap, scale, Answer::kProbabilities);
}

Tensor token_logprobs(const Tensor rows, const Tensor weight, const Optional bias, const Tensor token_ids,
                      double softcap, double scale) {
  check_product(rows, "rows", weight, bias, softcap, scale);
  check_device_array(token_ids, "token_ids", rows, ScalarType::Long, {rows.size(0)});
  const Labels labels{token_ids, nullptr};
  return run_stream(rows, weight, bias, &labels, softcap, scale, Answer::kLogprobs);
}

}  // namespace
}  // namespace pyruntime::cuda

STABLE_TORCH_LIBRARY_IMPL(pyruntime, CUDA, m) {
  m.impl("label_logits", TORCH_BOX(&pyruntime::cuda::label_logits));
  m.impl("label_scores", TORCH_BOX(&pyruntime::cuda::label_scores));
  m.impl("label_probabilities", TORCH_BOX(&pyruntime::cuda::label_probabilities));
  m.impl("token_logprobs", TORCH_BOX(&pyruntime::cuda::token_logprobs));
  m.impl("logsumexp", TORCH_BOX(&pyruntime::cuda::logsumexp));
}
