// packed_attention and paged_attention on CUDA.
#include "attention.cuh"

#include "../attention_checks.h"
#include "../cpu/scalars.h"
#include "launch.h"

namespace pyruntime::cuda {
namespace {

constexpr int64_t kMostParts = int64_t{128} << 20;  // bytes of workspace
constexpr int kBlocksEach = 4;                      // that keep a multiprocessor busy

void check_all(const Tensor& q, const Tensor& k, const Tensor& v, int64_t key_heads_at) {
  check_cuda(q, "q");
  check_beside(k, "k", q, "q");
  check_beside(v, "v", q, "q");
  check_element(q, "q");
  check_heads(q, k, v, key_heads_at);
  require(q.size(2) <= kWidest && v.size(key_heads_at + 1) <= kWidest, "q, v: heads must be at most ", kWidest,
          " wide on CUDA, got ", q.size(2), " and ", v.size(key_heads_at + 1));
}

struct Options {
  bool causal;
  double scale;
  int64_t window_left, window_right;
  double softcap;
  const Optional& sinks;
};

template <class T>
AttentionArguments<T> common(const Tensor& q, const Tensor& k, const Tensor& v, Tensor& out, const Tensor& query_starts,
                             const Options& o) {
  const int64_t heads_at = k.dim() - 2;
  AttentionArguments<T> a{};
  a.q = static_cast<const T*>(q.const_data_ptr());
  a.k = static_cast<const T*>(k.const_data_ptr());
  a.v = static_cast<const T*>(v.const_data_ptr());
  a.out = static_cast<T*>(out.mutable_data_ptr());
  a.q_row = q.stride(0), a.q_head = q.stride(1);
  a.k_row = k.stride(heads_at - 1), a.k_head = k.stride(heads_at);
  a.v_row = v.stride(heads_at - 1), a.v_head = v.stride(heads_at);
  a.rows = q.size(0), a.sequences = query_starts.size(0) - 1;
  a.q_heads = static_cast<int>(q.size(1)), a.kv_heads = static_cast<int>(k.size(heads_at));
  a.key_width = static_cast<int>(q.size(2)), a.value_width = static_cast<int>(v.size(heads_at + 1));
  a.query_starts = query_starts.const_data_ptr<int32_t>();
  a.causal = o.causal, a.scale = check_scale(o.scale), a.softcap = check_softcap(o.softcap);
  // No sequence is longer, and positions can be added to it.
  a.window_left = std::min<int64_t>(o.window_left, INT32_MAX);
  a.window_right = std::min<int64_t>(o.window_right, INT32_MAX);
  a.sinks = optional_data<float>(o.sinks);
  return a;
}

int multiprocessors(const Tensor& beside) {
  int count = 0;
  STD_CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, beside.get_device_index()));
  return count;
}

// Whether each split gets thread blocks of its own: where there are too few without, and the parts fit.
bool pays_to_split(int64_t blocks, int64_t splits, int64_t part_bytes, const Tensor& q) {
  if (splits < 2 || splits > 65535 || part_bytes * splits > kMostParts) return false;
  return blocks < int64_t{kBlocksEach} * multiprocessors(q);
}

template <class T, int Width, int Each>
void run_tiles(AttentionArguments<T>& a, int64_t most_keys, const Tensor& q) {
  constexpr int kRows = Each * kAttentionWarps;
  const int64_t tiles = a.rows * (a.q_heads / a.kv_heads) / kRows + a.sequences;
  const int64_t splits = (most_keys + kSplit - 1) / kSplit;
  const int64_t part = a.rows * a.q_heads * (a.value_width + 2);
  dim3 grid(blocks_of(tiles), blocks_along_y(a.kv_heads, 1));
  std::optional<Tensor> parts;
  if (pays_to_split(tiles * a.kv_heads, splits, part * static_cast<int64_t>(sizeof(float)), q)) {
    parts = empty_beside(q, {splits, part}, ScalarType::Float);
    a.parts = parts->mutable_data_ptr<float>();
    grid.z = static_cast<unsigned>(splits);
  }
  const cudaStream_t stream = current_stream(q);
  attention_kernel<T, Width, Each><<<grid, kAttentionThreads, 0, stream>>>(a);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  if (a.parts == nullptr) return;
  attention_join_kernel<T>
      <<<blocks_of(a.rows * a.q_heads, kAttentionWarps), kAttentionThreads, 0, stream>>>(a, static_cast<int>(splits));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

// Few rows a sequence, as in decoding, leave most of a tall tile idle; the bits are the same in both.
template <class T, int Width, int Most>
void run_width(AttentionArguments<T>& a, int64_t most_keys, const Tensor& q) {
  const bool is_low = a.rows * (a.q_heads / a.kv_heads) <= kAttentionWarps * a.sequences;
  return is_low ? run_tiles<T, Width, 1>(a, most_keys, q) : run_tiles<T, Width, Most>(a, most_keys, q);
}

template <class T>
void run(AttentionArguments<T>& a, int64_t most_keys, const Tensor& q) {
  if (a.rows == 0 || a.sequences == 0) return;
  const int width = std::max(a.key_width, a.value_width);
  if (width <= 64) return run_width<T, 64, 4>(a, most_keys, q);
  if (width <= 128) return run_width<T, 128, 4>(a, most_keys, q);
  if (width <= 256) return run_width<T, 256, 4>(a, most_keys, q);
  run_width<T, kWidest, 2>(a, most_keys, q);
}

void check_options(const Tensor& q, const Options& o) {
  check_windows(o.window_left, o.window_right);
  check_scale(o.scale);
  check_softcap(o.softcap);
  if (o.sinks.has_value()) check_device_array(*o.sinks, "sinks", q, ScalarType::Float, {q.size(1)});
}

Tensor packed_attention(const Tensor q, const Tensor k, const Tensor v, const Tensor starts, bool causal, double scale,
                        int64_t window_left, int64_t window_right, double softcap, const Optional sinks) {
  const Options options{causal, scale, window_left, window_right, softcap, sinks};
  check_all(q, k, v, 1);
  check_packed_rows(q, k, v);
  check_device_starts(starts, "starts", q);
  check_options(q, options);
  const torch::stable::accelerator::DeviceGuard guard(q.get_device_index());
  Tensor out = empty_beside(q, {q.size(0), q.size(1), v.size(2)}, q.scalar_type());
  dispatch(q, [&](auto element) {
    auto a = common<decltype(element)>(q, k, v, out, starts, options);
    run(a, a.rows, q);
  });
  return out;
}

Tensor paged_attention(const Tensor q, const Tensor k_cache, const Tensor v_cache, const Tensor query_starts,
                       const Tensor kv_lengths, const Tensor block_tables, bool causal, double scale,
                       int64_t window_left, double softcap, const Optional sinks) {
  const Options options{causal, scale, window_left, -1, softcap, sinks};
  check_all(q, k_cache, v_cache, 2);
  check_same_blocks(k_cache, v_cache);
  check_block_size(k_cache);
  const int64_t sequences = check_device_starts(query_starts, "query_starts", q);
  check_device_array(kv_lengths, "kv_lengths", q, ScalarType::Int, {sequences});
  check_device_array(block_tables, "block_tables", q, ScalarType::Int, {sequences, -1});
  check_options(q, options);
  const torch::stable::accelerator::DeviceGuard guard(q.get_device_index());
  Tensor out = empty_beside(q, {q.size(0), q.size(1), v_cache.size(3)}, q.scalar_type());
  dispatch(q, [&](auto element) {
    auto a = common<decltype(element)>(q, k_cache, v_cache, out, query_starts, options);
    a.k_block = k_cache.stride(0), a.v_block = v_cache.stride(0);
    a.kv_lengths = kv_lengths.const_data_ptr<int32_t>();
    a.block_tables = block_tables.const_data_ptr<int32_t>();
    a.table_width = block_tables.size(1), a.block_size = k_cache.size(1), a.blocks = k_cache.size(0);
    run(a, a.table_width * a.block_size, q);
  });
  return out;
}

}  // namespace
}  // namespace pyruntime::cuda

STABLE_TORCH_LIBRARY_IMPL(pyruntime, CUDA, m) {
  m.impl("packed_attention", TORCH_BOX(&pyruntime::cuda::packed_attention));
  m.impl("paged_attention", TORCH_BOX(&pyruntime::cuda::paged_attention));
}
