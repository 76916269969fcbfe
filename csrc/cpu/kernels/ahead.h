// Memory that a loop will want after what it is at.
#pragma once

#include "vec.h"

namespace pyruntime::PYRUNTIME_ISA {

// Reads memory ahead of a product that will want it, a few lines at every step of the one at hand.
struct Ahead {
  const char* next = nullptr;
  const char* end = nullptr;
  int64_t lines = 0;  // a step

  inline __attribute__((always_inline)) void step() {
    for (int64_t i = 0; i < lines; ++i, next += 64) {
      if (next < end) __builtin_prefetch(next, 0, 2);
    }
  }
};
struct NoAhead {
  inline __attribute__((always_inline)) void step() {}
};

// `bytes` from `from` on in equal shares, within `steps` steps; there may be none, where rows are a word long.
inline Ahead read_within(const void* from, int64_t bytes, int64_t steps) {
  if (steps < 1) return {};
  const char* begin = static_cast<const char*>(from);
  return {begin, begin + bytes, (bytes / 64 + steps - 1) / steps};
}

}  // namespace pyruntime::PYRUNTIME_ISA
