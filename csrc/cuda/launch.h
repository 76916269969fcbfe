// What every launcher does around its kernel: check where tensors lie and how they are laid out, guard the device, take
// torch's current stream, dispatch on the dtype. Values on the device are not looked at (that would wait for it): the
// kernels answer NaN or -1 for wrong ones. No launcher synchronises, and torch's allocator serves outputs and
// workspaces, so a graph can capture all of them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>

#include <initializer_list>
#include <optional>
#include <vector>

#include "../checks.h"

namespace pyruntime::cuda {

using Optional = std::optional<Tensor>;

inline void check_cuda(const Tensor& t, const char* name) {
  require(t.is_cuda(), name, ": expected a CUDA tensor, got one on another device");
}

inline void check_beside(const Tensor& t, const char* name, const Tensor& other, const char* other_name) {
  require(t.is_cuda() && t.get_device_index() == other.get_device_index(), name,
          ": expected a tensor on the device of ", other_name);
}

// An index or parameter array: dense, on the device of `beside`, of one dtype.
inline void check_device_array(const Tensor& t, const char* name, const Tensor& beside, ScalarType dtype,
                               std::initializer_list<int64_t> shape) {
  require(t.is_cuda() && t.get_device_index() == beside.get_device_index(), name,
          ": expected a tensor on the device of the first argument");
  require(t.scalar_type() == dtype, name, ": expected dtype ", torch::headeronly::toString(dtype), ", got ",
          describe(t));
  check_shape(t, name, shape);
  require(t.is_contiguous(), name, ": expected a contiguous tensor");
}

// Of a dtype that dispatch takes.
inline void check_element(const Tensor& t, const char* name) {
  const ScalarType dtype = t.scalar_type();
  require(dtype == ScalarType::Float || dtype == ScalarType::BFloat16 || dtype == ScalarType::Half, name,
          ": expected float32, bfloat16 or float16, got ", describe(t));
}

// A matrix with dense rows, of such a dtype.
inline void check_matrix(const Tensor& t, const char* name) {
  check_cuda(t, name);
  check_shape(t, name, {-1, -1});
  check_dense_rows(t, name);
  check_element(t, name);
}

// starts [S + 1]; returns S.
inline int64_t check_device_starts(const Tensor& starts, const char* name, const Tensor& beside) {
  check_device_array(starts, name, beside, ScalarType::Int, {-1});
  require(starts.size(0) >= 1, name, ": expected at least one entry, got ", describe(starts));
  return starts.size(0) - 1;
}

inline Tensor empty_beside(const Tensor& beside, std::initializer_list<int64_t> shape, ScalarType dtype) {
  const std::vector<int64_t> sizes(shape);
  return torch::stable::empty({sizes.data(), sizes.size()}, dtype, std::nullopt, beside.device());
}

inline cudaStream_t current_stream(const Tensor& beside) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(beside.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

// Grid sizes along x; along y and z the device takes at most 65535.
inline unsigned blocks_of(int64_t count, int64_t each = 1) {
  const int64_t blocks = (count + each - 1) / each;
  require(blocks <= INT32_MAX, "too large: ", blocks, " blocks in one launch");
  return static_cast<unsigned>(blocks);
}

inline unsigned blocks_along_y(int64_t count, int64_t each) {
  const unsigned blocks = blocks_of(count, each);
  require(blocks <= 65535, "too large: ", blocks, " tiles in one launch, at most 65535");
  return blocks;
}

// call(T{}) with the element type of `t`, which check_element has passed.
template <class Call>
void dispatch(const Tensor& t, const Call& call) {
  switch (t.scalar_type()) {
    case ScalarType::BFloat16:
      return call(__nv_bfloat16{});
    case ScalarType::Half:
      return call(__half{});
    default:
      return call(float{});
  }
}

template <class T>
const T* optional_data(const Optional& t) {
  return t.has_value() ? t->const_data_ptr<T>() : nullptr;
}

}  // namespace pyruntime::cuda
