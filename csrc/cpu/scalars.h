// Checks of scalar options: Python hands over doubles, the kernels compute with float32.
#pragma once

#include <cmath>

#include "../checks.h"

namespace pyruntime {

// 0, or a normal float32.
inline float check_scale(double scale) {
  const double size = std::abs(scale);
  require(scale == 0.0 || (size >= 0x1p-126 && size <= 0x1.fffffep127),
          "scale: must be finite and 0 or at least 1.2e-38 in size, as float32, got ", scale);
  return static_cast<float>(scale);
}

// 0 (off), or a number whose inverse is a float32, too.
inline float check_softcap(double softcap) {
  require(softcap == 0.0 || (softcap >= 1e-30 && softcap <= 1e30),
          "softcap: must be 0 (off) or a positive number from 1e-30 to 1e30, got ", softcap);
  return static_cast<float>(softcap);
}

}  // namespace pyruntime
