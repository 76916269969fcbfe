#include "registry.h"

#include "../../csrc/cuda/scores.cuh"

namespace pyruntime::cuda {
namespace {

unsigned tiles_of(int64_t count, int64_t tile) { return static_cast<unsigned>((count + tile - 1) / tile); }

// x, w, bias; bias type, x_row, w_row, rows, columns, depth, softcap, scale
template <class T>
ProductArguments<T> product(const emulate::Arguments& a) {
  return {a.array<T>(0), a.array<T>(1), a.array<void>(2), static_cast<BiasType>(a.integer(3)),
          a.integer(4),  a.integer(5),  a.integer(6),     a.integer(7),
          a.integer(8),  a.real(9),     a.real(10)};
}

// ... label ids, label starts, number of labels, out, temperature
template <class T>
void labels(const emulate::Arguments& a) {
  const LabelArguments l{a.array<int64_t>(11), a.array<int32_t>(12), a.integer(13), a.array<float>(14)};
  const ProductArguments<T> p = product<T>(a);
  emulate::launch(dim3(static_cast<unsigned>(p.rows)), kLabelThreads,
                  [&] { label_kernel<T>(p, l, a.array<float>(15)); });
}

// ... label ids, label starts, number of labels, out, maxima, sums, answer, rows a tile
template <class T>
void stream(const emulate::Arguments& a) {
  const LabelArguments l{a.array<int64_t>(11), a.array<int32_t>(12), a.integer(13), a.array<float>(14)};
  const ProductArguments<T> p = product<T>(a);
  float *maxima = a.array<float>(15), *sums = a.array<float>(16);
  const dim3 grid(tiles_of(p.columns, kTileColumns), tiles_of(p.rows, a.integer(18)));
  if (a.integer(18) == 8) {
    emulate::launch(grid, kProductThreads, [&] { logsumexp_kernel<T, 8>(p, maxima, sums); });
  } else {
    emulate::launch(grid, kProductThreads, [&] { logsumexp_kernel<T, 64>(p, maxima, sums); });
  }
  emulate::launch(dim3(static_cast<unsigned>(p.rows)), kLabelThreads,
                  [&] { combine_kernel<T>(p, l, maxima, sums, grid.x, static_cast<Answer>(a.integer(17))); });
}

}  // namespace

EMULATED(labels_float32) { labels<float>(a); }
EMULATED(labels_bfloat16) { labels<__nv_bfloat16>(a); }
EMULATED(labels_float16) { labels<__half>(a); }
EMULATED(stream_float32) { stream<float>(a); }
EMULATED(stream_bfloat16) { stream<__nv_bfloat16>(a); }
EMULATED(stream_float16) { stream<__half>(a); }

}  // namespace pyruntime::cuda
