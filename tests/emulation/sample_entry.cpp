#include "registry.h"

#include "../../csrc/cuda/sample.cuh"

namespace pyruntime::cuda {
namespace {

// In the order of the op's schema from the logits on, then ids, logprobs, top_ids, top_values, scratch; rows, columns,
// row_stride, number of seen ids, number of biased ids.
template <class T>
void run(const emulate::Arguments& a) {
  SampleArguments s{};
  s.row_stride = a.integer(26), s.vocabulary = a.integer(25);
  s.temperature = a.array<float>(1), s.top_k = a.array<int32_t>(2), s.top_p = a.array<float>(3);
  s.min_p = a.array<float>(4), s.seeds = a.array<int64_t>(5), s.positions = a.array<int64_t>(6);
  s.indices = a.array<int32_t>(7);
  s.repetition = a.array<float>(8), s.frequency = a.array<float>(9), s.presence = a.array<float>(10);
  s.seen_ids = a.array<int64_t>(11), s.seen_generated = a.array<int32_t>(12), s.seen_starts = a.array<int32_t>(13);
  s.bias_ids = a.array<int64_t>(14), s.bias_values = a.array<float>(15), s.bias_starts = a.array<int32_t>(16);
  s.bitmask = a.array<uint32_t>(17), s.bitmask_stride = (s.vocabulary + 31) / 32, s.top_logprobs = a.integer(18);
  s.ids = a.array<int64_t>(19), s.logprobs = a.array<float>(20), s.top_ids = a.array<int64_t>(21);
  s.top_values = a.array<float>(22), s.scratch = a.array<float>(23);
  s.seen = a.integer(27), s.biased = a.integer(28);
  emulate::launch(dim3(static_cast<unsigned>(a.integer(24))), kSelectThreads,
                  [&] { sample_kernel<T>(a.array<T>(0), s); });
}

}  // namespace

EMULATED(sample_float32) { run<float>(a); }
EMULATED(sample_bfloat16) { run<__nv_bfloat16>(a); }
EMULATED(sample_float16) { run<__half>(a); }

}  // namespace pyruntime::cuda
