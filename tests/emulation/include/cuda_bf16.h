// Stands in for CUDA's header, of which the kernels use the type and its widening alone.
#pragma once

#include <cstdint>
#include <cstring>

struct __nv_bfloat16 {
  uint16_t bits;
};

inline float __bfloat162float(__nv_bfloat16 x) {
  const uint32_t wide = static_cast<uint32_t>(x.bits) << 16;
  float value;
  memcpy(&value, &wide, sizeof(value));
  return value;
}
