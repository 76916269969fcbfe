// CUDA's language for g++: include this, then any .cuh file of csrc/cuda, and launch its kernels on the CPU.
//
// Blocks run one after the other; the threads of a block are fibres that run until they reach a barrier or a warp
// operation, in an order that `set_order` chooses. A kernel with a missing barrier therefore gives different answers
// in different orders, and under -fsanitize=thread, which is told of the fibres, a report. These raise
// emulate::Failure: a barrier that some threads of the block never reach, threads at different barriers, a warp
// operation that some lanes never reach, a mask of fewer than 32 lanes.
// Outside CUDA's rules for good: warps do not run in lockstep, and blocks cannot wait for each other.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <type_traits>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __shared__ static

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

namespace emulate {

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

enum class Order : int { kForward = 0, kReverse = 1, kRandom = 2 };  // of the blocks, and of the threads of a block

void set_order(Order order, uint64_t seed);

// Runs `kernel` once for each thread of each block; `threads` is a multiple of 32.
void launch(dim3 grid, int threads, const std::function<void()>& kernel);

dim3 thread_index();
dim3 block_index();
dim3 block_size();
dim3 grid_size();

// Each waits until every thread of the block, or lane of the warp, has reached the same line.
void barrier(const char* file, int line);
void warp_barrier(unsigned mask, const char* file, int line);
uint64_t warp_shuffle(unsigned mask, uint64_t value, int from, const char* file, int line);
unsigned warp_ballot(unsigned mask, bool vote, const char* file, int line);
int lane();

template <class T>
T shuffle(unsigned mask, T value, int from, const char* file, int line) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>);
  uint64_t word = 0;
  memcpy(&word, &value, sizeof(T));
  word = warp_shuffle(mask, word, from, file, line);
  memcpy(&value, &word, sizeof(T));
  return value;
}

}  // namespace emulate

#define threadIdx (::emulate::thread_index())
#define blockIdx (::emulate::block_index())
#define blockDim (::emulate::block_size())
#define gridDim (::emulate::grid_size())
#define __syncthreads() ::emulate::barrier(__FILE__, __LINE__)
#define __syncwarp(...) ::emulate::warp_barrier(0xffffffffu, __FILE__, __LINE__)
#define __shfl_sync(mask, x, from) ::emulate::shuffle(mask, x, from, __FILE__, __LINE__)
#define __shfl_xor_sync(mask, x, bits) ::emulate::shuffle(mask, x, ::emulate::lane() ^ (bits), __FILE__, __LINE__)
// Lanes below the distance keep their own value, as on the device.
#define __shfl_up_sync(mask, x, by)                                                                              \
  ::emulate::shuffle(mask, x, ::emulate::lane() < (by) ? ::emulate::lane() : ::emulate::lane() - (by), __FILE__, \
                     __LINE__)
#define __ballot_sync(mask, vote) ::emulate::warp_ballot(mask, vote, __FILE__, __LINE__)
#define __any_sync(mask, vote) (::emulate::warp_ballot(mask, vote, __FILE__, __LINE__) != 0)
#define __all_sync(mask, vote) (::emulate::warp_ballot(mask, vote, __FILE__, __LINE__) == 0xffffffffu)

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }

template <class T>
T atomicAdd(T* address, T value) {
  return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}

template <class T>
T atomicMin(T* address, T value) {
  T seen = __atomic_load_n(address, __ATOMIC_RELAXED);
  while (value < seen &&
         !__atomic_compare_exchange_n(address, &seen, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return seen;
}

template <class T>
T atomicOr(T* address, T value) {
  return __atomic_fetch_or(address, value, __ATOMIC_RELAXED);
}
