#include "registry.h"

#include "../../csrc/cuda/delimiter.cuh"
#include "../../csrc/cuda/sparse.cuh"

namespace pyruntime::cuda {
namespace {

unsigned tiles_of(int64_t count, int64_t tile) { return static_cast<unsigned>((count + tile - 1) / tile); }

// hidden, weight, bias, bias type, hidden stride, weight stride, rows, columns, depth, starts, sequences, out, rows a
// tile
template <class T>
void splade(const emulate::Arguments& a) {
  const ProductArguments<T> p{a.array<T>(0),
                              a.array<T>(1),
                              a.array<void>(2),
                              static_cast<BiasType>(a.integer(3)),
                              a.integer(4),
                              a.integer(5),
                              a.integer(6),
                              a.integer(7),
                              a.integer(8),
                              0.0f,
                              1.0f};
  const dim3 grid(static_cast<unsigned>(a.integer(10)), tiles_of(p.columns, kTileColumns));
  const auto* starts = a.array<int32_t>(9);
  float* out = a.array<float>(11);
  if (a.integer(12) == 8) {
    emulate::launch(grid, kProductThreads, [&] { pool_sparse_kernel<T, 8>(p, starts, out); });
  } else {
    emulate::launch(grid, kProductThreads, [&] { pool_sparse_kernel<T, 64>(p, starts, out); });
  }
}

// hidden, weight, starts, token ids, skip, rows, width, row_stride, skipped, sequences, bias, weights, best,
// out_starts, out ids, out weights
template <class T>
void lexical(const emulate::Arguments& a) {
  const LexicalArguments l{a.array<int32_t>(2), a.array<int64_t>(3), a.array<int64_t>(4), a.integer(5), a.integer(6),
                           a.integer(7),        a.integer(8),        a.integer(9),        a.real(10)};
  float *weights = a.array<float>(11), *best = a.array<float>(12);
  int32_t* starts = a.array<int32_t>(13);
  const dim3 sequences(static_cast<unsigned>(l.sequences));
  emulate::launch(dim3(tiles_of(l.rows, kScanThreads / kWarp)), kScanThreads,
                  [&] { lexical_dot_kernel<T>(a.array<T>(0), a.array<T>(1), l, weights); });
  emulate::launch(sequences, kScanThreads, [&] { lexical_best_kernel(l, weights, best, starts + 1); });
  emulate::launch(dim3(1), kScanThreads, [&] { scan_kernel(starts + 1, l.sequences, starts); });
  emulate::launch(sequences, kScanThreads,
                  [&] { lexical_write_kernel(l, best, starts, a.array<int64_t>(14), a.array<float>(15)); });
  emulate::launch(dim3(2), kScanThreads,
                  [&] { fill_rest_kernel<int64_t>(starts, l.sequences, l.rows, -1, a.array<int64_t>(14)); });
  emulate::launch(dim3(2), kScanThreads,
                  [&] { fill_rest_kernel<float>(starts, l.sequences, l.rows, 0.0f, a.array<float>(15)); });
}

}  // namespace

EMULATED(splade_float32) { splade<float>(a); }
EMULATED(splade_bfloat16) { splade<__nv_bfloat16>(a); }
EMULATED(splade_float16) { splade<__half>(a); }
EMULATED(lexical_float32) { lexical<float>(a); }
EMULATED(lexical_bfloat16) { lexical<__nv_bfloat16>(a); }
EMULATED(lexical_float16) { lexical<__half>(a); }

// input ids, rows, starts, sequences, delimiter, out starts, out
EMULATED(delimiter) {
  const int64_t *ids = a.array<int64_t>(0), rows = a.integer(1), sequences = a.integer(3), delimiter = a.integer(4);
  const int32_t* starts = a.array<int32_t>(2);
  int32_t* out_starts = a.array<int32_t>(5);
  const dim3 grid(static_cast<unsigned>(sequences));
  emulate::launch(grid, kScanThreads, [&] { count_delimiters_kernel(ids, rows, starts, delimiter, out_starts + 1); });
  emulate::launch(dim3(1), kScanThreads, [&] { scan_kernel(out_starts + 1, sequences, out_starts); });
  emulate::launch(grid, kScanThreads,
                  [&] { delimiter_rows_kernel(ids, rows, starts, delimiter, out_starts, a.array<int64_t>(6)); });
  emulate::launch(dim3(2), kScanThreads,
                  [&] { fill_rest_kernel<int64_t>(out_starts, sequences, rows, -1, a.array<int64_t>(6)); });
}

}  // namespace pyruntime::cuda
