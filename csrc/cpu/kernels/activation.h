// Activations of sixteen values, each to a few units in the last place of float32.
#pragma once

#include "vec.h"

namespace pyruntime::PYRUNTIME_ISA {

// erf(x) = x P(x^2) / Q(x^2) for |x| < 4, past which it is ±1 in float32. Rational minimax approximation, absolute
// error below 5e-7; the coefficients are those that numerical libraries use for float32.
PYRUNTIME_INLINE Vec error_function(Vec x) {
  Vec limited = x > splat(4.0f) ? splat(4.0f) : x;
  limited = limited < splat(-4.0f) ? splat(-4.0f) : limited;
  const Vec s = limited * limited;
  Vec p = splat(-2.72614225801306e-10f);
  p = p * s + 2.77068142495902e-08f;
  p = p * s + -2.10102402082508e-06f;
  p = p * s + -5.69250639462346e-05f;
  p = p * s + -7.34990630326855e-04f;
  p = p * s + -2.95459980854025e-03f;
  p = p * s + -1.60960333262415e-02f;
  Vec q = splat(-1.45660718464996e-05f);
  q = q * s + -2.13374055278905e-04f;
  q = q * s + -1.68282697438203e-03f;
  q = q * s + -7.37332916720468e-03f;
  q = q * s + -1.42647390514189e-02f;
  return limited * p / q;
}

template <Activation A>
PYRUNTIME_INLINE Vec activate(Vec x) {
  if constexpr (A == Activation::kGelu) return 0.5f * x * (1.0f + error_function(x * 0.70710678118654752f));
  if constexpr (A == Activation::kGeluTanh) {
    return 0.5f * x * (1.0f + hyperbolic_tangent(0.79788456080286536f * (x + 0.044715f * (x * x * x))));
  }
  if constexpr (A == Activation::kSilu) {
    // Below -87 e^-x is past float32; what is left there is 0 to 36 digits.
    const Vec power = exponential(-x);
    return x / (1.0f + power);
  }
  return x;
}

// work(the activation as a constant), so that the choice is made once and not for each value.
template <class Work>
PYRUNTIME_INLINE void with_activation(Activation activation, const Work& work) {
  switch (activation) {
    case Activation::kNone:
      return work(std::integral_constant<Activation, Activation::kNone>{});
    case Activation::kGelu:
      return work(std::integral_constant<Activation, Activation::kGelu>{});
    case Activation::kGeluTanh:
      return work(std::integral_constant<Activation, Activation::kGeluTanh>{});
    case Activation::kSilu:
      return work(std::integral_constant<Activation, Activation::kSilu>{});
  }
}

}  // namespace pyruntime::PYRUNTIME_ISA
