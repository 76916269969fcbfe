#include "registry.h"

#include "../../csrc/cuda/attention.cuh"
#include "../../csrc/cuda/cache.cuh"

namespace pyruntime::cuda {
namespace {

enum Integer {
  kRows,
  kSequences,
  kQHeads,
  kKvHeads,
  kKeyWidth,
  kValueWidth,
  kQRow,
  kQHead,
  kKRow,
  kKHead,
  kKBlock,
  kVRow,
  kVHead,
  kVBlock,
  kTableWidth,
  kBlockSize,
  kBlocks,
  kCausal,
  kWindowLeft,
  kWindowRight,
  kEach,
  kSplits,
};

template <class T, int Width, int Each>
void run_tiles(const AttentionArguments<T>& a, int64_t splits) {
  const int64_t tiles = a.rows * (a.q_heads / a.kv_heads) / (Each * kAttentionWarps) + a.sequences;
  const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(a.kv_heads), static_cast<unsigned>(splits));
  emulate::launch(grid, kAttentionThreads, [&] { attention_kernel<T, Width, Each>(a); });
  if (a.parts == nullptr) return;
  const int64_t blocks = (a.rows * a.q_heads + kAttentionWarps - 1) / kAttentionWarps;
  emulate::launch(dim3(static_cast<unsigned>(blocks)), kAttentionThreads,
                  [&] { attention_join_kernel(a, static_cast<int>(splits)); });
}

// Of each width that the launcher chooses from; the sanitizers, under which a template takes long to compile, see two.
template <class T>
void run_width(const AttentionArguments<T>& a, bool is_low, int64_t splits) {
  const int width = a.key_width > a.value_width ? a.key_width : a.value_width;
  if (width <= 64) return is_low ? run_tiles<T, 64, 1>(a, splits) : run_tiles<T, 64, 4>(a, splits);
  if (width <= 128) return is_low ? run_tiles<T, 128, 1>(a, splits) : run_tiles<T, 128, 4>(a, splits);
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  throw emulate::Failure("heads of " + std::to_string(width) + " are not built here");
#else
  if (width <= 256) return is_low ? run_tiles<T, 256, 1>(a, splits) : run_tiles<T, 256, 4>(a, splits);
  is_low ? run_tiles<T, 512, 1>(a, splits) : run_tiles<T, 512, 2>(a, splits);
#endif
}

// q, k, v, out, query_starts, kv_lengths, block_tables, sinks, parts, [the integers above], scale, softcap
template <class T>
void run(const emulate::Arguments& e) {
  const int64_t* n = e.array<int64_t>(9);
  AttentionArguments<T> a{};
  a.q = e.array<T>(0), a.k = e.array<T>(1), a.v = e.array<T>(2), a.out = e.array<T>(3);
  a.query_starts = e.array<int32_t>(4), a.kv_lengths = e.array<int32_t>(5), a.block_tables = e.array<int32_t>(6);
  a.sinks = e.array<float>(7), a.parts = e.array<float>(8);
  a.rows = n[kRows], a.sequences = n[kSequences];
  a.q_heads = static_cast<int>(n[kQHeads]), a.kv_heads = static_cast<int>(n[kKvHeads]);
  a.key_width = static_cast<int>(n[kKeyWidth]), a.value_width = static_cast<int>(n[kValueWidth]);
  a.q_row = n[kQRow], a.q_head = n[kQHead], a.k_row = n[kKRow], a.k_head = n[kKHead], a.k_block = n[kKBlock];
  a.v_row = n[kVRow], a.v_head = n[kVHead], a.v_block = n[kVBlock];
  a.table_width = n[kTableWidth], a.block_size = n[kBlockSize], a.blocks = n[kBlocks];
  a.causal = n[kCausal] != 0, a.window_left = n[kWindowLeft], a.window_right = n[kWindowRight];
  a.scale = e.real(10), a.softcap = e.real(11);
  run_width(a, n[kEach] == 1, n[kSplits]);
}

// cache, rows or null; block_stride, row_stride, head_stride, heads, width, token_stride, rows_head_stride
template <class Unit>
CacheArguments<Unit> cache_arguments(const emulate::Arguments& e, int first) {
  const int64_t* n = e.array<int64_t>(first + 2);
  return {e.array<Unit>(first), n[0], n[1], n[2], n[3], n[4], e.array<Unit>(first + 1), n[5], n[6]};
}

// keys and values as above, slots or pairs, their count, blocks, block_size
template <class Unit>
void copy(const emulate::Arguments& e, bool is_store) {
  const auto keys = cache_arguments<Unit>(e, 0), values = cache_arguments<Unit>(e, 3);
  const int64_t count = e.integer(7), blocks = e.integer(8), size = e.integer(9);
  const int64_t units = (is_store ? count : size) * (keys.heads * keys.width + values.heads * values.width);
  emulate::launch(dim3(static_cast<unsigned>((units + kCopyThreads - 1) / kCopyThreads)), kCopyThreads, [&] {
    if (is_store) {
      store_kv_kernel(keys, values, e.array<int64_t>(6), count, blocks, size);
    } else {
      copy_blocks_kernel(keys, values, e.array<int64_t>(6), count, blocks, size);
    }
  });
}

}  // namespace

EMULATED(attention_float32) { run<float>(a); }
EMULATED(attention_bfloat16) { run<__nv_bfloat16>(a); }
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
EMULATED(attention_float16) { run<__half>(a); }
#endif
EMULATED(store_kv_16) { copy<Bytes16>(a, true); }
EMULATED(store_kv_4) { copy<uint32_t>(a, true); }
EMULATED(store_kv_2) { copy<uint16_t>(a, true); }
EMULATED(copy_blocks_16) { copy<Bytes16>(a, false); }
EMULATED(copy_blocks_4) { copy<uint32_t>(a, false); }
EMULATED(copy_blocks_2) { copy<uint16_t>(a, false); }

}  // namespace pyruntime::cuda
