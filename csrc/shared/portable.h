// What lets one function body compile for the host (g++) and the device (nvcc) with the same results, bit for bit.
//
// Whoever includes a header of this folder under g++ compiles with -ffp-contract=off; on the device the rounding
// intrinsics below keep the compiler from fusing. Everything here has internal linkage: the CPU kernels are compiled
// once for each instruction set, and the linker must not merge the copies.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define PYRUNTIME_HD static __host__ __device__ __forceinline__
#else
#define PYRUNTIME_HD static inline __attribute__((always_inline))
#endif

namespace pyruntime::shared {

#if defined(__CUDA_ARCH__)
PYRUNTIME_HD float multiply(float a, float b) { return __fmul_rn(a, b); }
PYRUNTIME_HD float add(float a, float b) { return __fadd_rn(a, b); }
PYRUNTIME_HD float subtract(float a, float b) { return __fsub_rn(a, b); }
PYRUNTIME_HD float divide(float a, float b) { return __fdiv_rn(a, b); }
PYRUNTIME_HD uint32_t bits_of(float x) { return __float_as_uint(x); }
PYRUNTIME_HD float float_of(uint32_t bits) { return __uint_as_float(bits); }
PYRUNTIME_HD uint64_t multiply_high(uint64_t a, uint64_t b) { return __umul64hi(a, b); }
#else
PYRUNTIME_HD float multiply(float a, float b) { return a * b; }
PYRUNTIME_HD float add(float a, float b) { return a + b; }
PYRUNTIME_HD float subtract(float a, float b) { return a - b; }
PYRUNTIME_HD float divide(float a, float b) { return a / b; }
PYRUNTIME_HD uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof(bits));
  return bits;
}
PYRUNTIME_HD float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof(x));
  return x;
}
PYRUNTIME_HD uint64_t multiply_high(uint64_t a, uint64_t b) {
  __extension__ typedef unsigned __int128 Wide;
  return static_cast<uint64_t>((static_cast<Wide>(a) * b) >> 64);
}
#endif

}  // namespace pyruntime::shared
