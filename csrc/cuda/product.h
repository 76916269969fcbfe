// The checks of x [R, H], weight [V, H] and bias [V], and the kernels' arguments from them.
#pragma once

#include "../cpu/scalars.h"
#include "launch.h"
#include "product.cuh"

namespace pyruntime::cuda {

inline BiasType bias_type(const Optional& bias) {
  if (!bias.has_value()) return BiasType::kNone;
  switch (bias->scalar_type()) {
    case ScalarType::Float:
      return BiasType::kFloat32;
    case ScalarType::BFloat16:
      return BiasType::kBFloat16;
    case ScalarType::Half:
      return BiasType::kFloat16;
    default:
      require(false, "bias: expected float32, bfloat16 or float16, got ", describe(*bias));
  }
  return BiasType::kNone;
}

inline void check_product(const Tensor& x, const char* x_name, const Tensor& weight, const Optional& bias,
                          double softcap = 0.0, double scale = 1.0) {
  check_matrix(x, x_name);
  check_matrix(weight, "weight");
  check_beside(weight, "weight", x, x_name);
  require(weight.scalar_type() == x.scalar_type(), "weight: expected the dtype of ", x_name, ", got ",
          describe(weight));
  require(x.size(1) >= 1, x_name, ": rows must be at least one wide, got ", describe(x));
  check_shape(weight, "weight", {-1, x.size(1)});
  check_softcap(softcap);
  check_scale(scale);
  if (!bias.has_value()) return;
  check_beside(*bias, "bias", x, x_name);
  check_shape(*bias, "bias", {weight.size(0)});
  require(bias->is_contiguous(), "bias: expected a contiguous tensor");
  bias_type(bias);
}

// After check_product.
template <class T>
ProductArguments<T> product_arguments(const Tensor& x, const Tensor& weight, const Optional& bias, double softcap = 0.0,
                                      double scale = 1.0) {
  return {static_cast<const T*>(x.const_data_ptr()),
          static_cast<const T*>(weight.const_data_ptr()),
          bias.has_value() ? bias->const_data_ptr() : nullptr,
          bias_type(bias),
          x.stride(0),
          weight.stride(0),
          x.size(0),
          weight.size(0),
          x.size(1),
          static_cast<float>(softcap),
          static_cast<float>(scale)};
}

}  // namespace pyruntime::cuda
