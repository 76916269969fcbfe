#include "registry.h"

#include "../../csrc/cuda/pool.cuh"

namespace pyruntime::cuda {
namespace {

// hidden, out, starts, kinds, dimensions, normalize, named; sequences, rows, width, row_stride
template <class T>
void run(const emulate::Arguments& a) {
  const PoolArguments p{a.integer(10),       a.integer(9),        a.integer(8),
                        a.array<int32_t>(2), a.array<int32_t>(3), a.array<int32_t>(4),
                        a.array<bool>(5),    a.array<int64_t>(6), a.array<float>(1)};
  emulate::launch(dim3(static_cast<unsigned>(a.integer(7))), kPoolThreads, [&] { pool_kernel<T>(a.array<T>(0), p); });
}

}  // namespace

EMULATED(pool_float32) { run<float>(a); }
EMULATED(pool_bfloat16) { run<__nv_bfloat16>(a); }
EMULATED(pool_float16) { run<__half>(a); }

}  // namespace pyruntime::cuda
