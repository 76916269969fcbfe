// Stands in for CUDA's header, of which the kernels use the type, its widening and its rounding alone.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

struct __half {
  uint16_t bits;
};

inline float __half2float(__half x) {
  const int exponent = x.bits >> 10 & 31, fraction = x.bits & 1023;
  float value;
  if (exponent == 31) {
    value = fraction == 0 ? INFINITY : NAN;
  } else if (exponent == 0) {
    value = std::ldexp(static_cast<float>(fraction), -24);
  } else {
    value = std::ldexp(static_cast<float>(fraction + 1024), exponent - 25);
  }
  return x.bits >> 15 != 0 ? -value : value;
}

// To the nearest, ties to even: the steps of a half are those of a float scaled so that they are whole numbers.
inline __half __float2half_rn(float x) {
  if (x != x) return {0x7fff};
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  const float size = std::fabs(x);
  if (size >= 65520.0f) return {static_cast<uint16_t>(sign | 0x7c00)};
  int exponent = size < 0x1p-14f ? -14 : std::ilogb(size);
  auto steps = static_cast<uint32_t>(std::nearbyint(std::ldexp(size, 10 - exponent)));
  if (size < 0x1p-14f) return {static_cast<uint16_t>(sign | steps)};
  // A carry out of the fraction is the next exponent.
  return {static_cast<uint16_t>(sign | (static_cast<uint32_t>(exponent + 14) * 1024 + steps))};
}
