// store_kv and copy_blocks on CUDA.
#include "cache.cuh"

#include "../attention_checks.h"
#include "launch.h"

namespace pyruntime::cuda {
namespace {

void check_cache(const Tensor& cache, const char* name, const Tensor& beside) {
  check_beside(cache, name, beside, "k_cache");
  check_element(cache, name);
  check_shape(cache, name, {-1, -1, -1, -1});
  check_dense_rows(cache, name);
}

void check_caches(const Tensor& k_cache, const Tensor& v_cache) {
  check_cuda(k_cache, "k_cache");
  check_cache(k_cache, "k_cache", k_cache);
  check_cache(v_cache, "v_cache", k_cache);
  check_same_blocks(k_cache, v_cache);
  // One kernel writes both.
  require(v_cache.scalar_type() == k_cache.scalar_type(), "v_cache: expected the dtype of k_cache, got ",
          describe(v_cache));
}

void check_rows(const Tensor& rows, const char* name, const Tensor& cache, const char* cache_name, int64_t count) {
  check_beside(rows, name, cache, cache_name);
  require(rows.scalar_type() == cache.scalar_type(), name, ": expected the dtype of ", cache_name, ", got ",
          describe(rows));
  check_shape(rows, name, {count, cache.size(2), cache.size(3)});
  check_dense_rows(rows, name);
}

bool is_in_units(const Tensor& t, int64_t bytes) {
  const int64_t size = static_cast<int64_t>(t.element_size());
  bool fits = reinterpret_cast<uintptr_t>(t.const_data_ptr()) % bytes == 0 && t.size(t.dim() - 1) * size % bytes == 0;
  for (int64_t i = 0; i + 1 < t.dim(); ++i) fits = fits && t.stride(i) * size % bytes == 0;
  return fits;
}

// `rows` null: blocks are copied.
template <class Unit>
CacheArguments<Unit> arguments(Tensor& cache, const Tensor* rows) {
  const auto units = [&](int64_t elements) {
    return elements * static_cast<int64_t>(cache.element_size()) / static_cast<int64_t>(sizeof(Unit));
  };
  CacheArguments<Unit> c{};
  c.cache = static_cast<Unit*>(cache.mutable_data_ptr());
  c.block_stride = units(cache.stride(0)), c.row_stride = units(cache.stride(1)),
  c.head_stride = units(cache.stride(2));
  c.heads = cache.size(2), c.width = units(cache.size(3));
  if (rows == nullptr) return c;
  c.rows = static_cast<const Unit*>(rows->const_data_ptr());
  c.token_stride = units(rows->stride(0)), c.rows_head_stride = units(rows->stride(1));
  return c;
}

// call(Unit{}) with the largest unit that all tensors consist of.
template <class Call>
void dispatch_units(std::initializer_list<const Tensor*> tensors, const Call& call) {
  bool is_wide = true;
  for (const Tensor* t : tensors) is_wide = is_wide && is_in_units(*t, sizeof(Bytes16));
  if (is_wide) return call(Bytes16{});
  if ((*tensors.begin())->element_size() == 2) return call(uint16_t{});
  call(uint32_t{});
}

void store_kv(const Tensor k, const Tensor v, const Tensor slot_mapping, Tensor k_cache, Tensor v_cache) {
  check_caches(k_cache, v_cache);
  check_device_array(slot_mapping, "slot_mapping", k_cache, ScalarType::Long, {-1});
  const int64_t tokens = slot_mapping.size(0), blocks = k_cache.size(0), size = k_cache.size(1);
  check_rows(k, "k", k_cache, "k_cache", tokens);
  check_rows(v, "v", v_cache, "v_cache", tokens);
  const torch::stable::accelerator::DeviceGuard guard(k_cache.get_device_index());
  dispatch_units({&k, &v, &k_cache, &v_cache}, [&](auto unit) {
    const auto keys = arguments<decltype(unit)>(k_cache, &k), values = arguments<decltype(unit)>(v_cache, &v);
    const int64_t count = tokens * (keys.heads * keys.width + values.heads * values.width);
    if (count == 0) return;
    store_kv_kernel<<<blocks_of(count, kCopyThreads), kCopyThreads, 0, current_stream(k_cache)>>>(
        keys, values, slot_mapping.const_data_ptr<int64_t>(), tokens, blocks, size);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

void copy_blocks(Tensor k_cache, Tensor v_cache, const Tensor pairs) {
  check_caches(k_cache, v_cache);
  check_device_array(pairs, "pairs", k_cache, ScalarType::Long, {-1, 2});
  const torch::stable::accelerator::DeviceGuard guard(k_cache.get_device_index());
  dispatch_units({&k_cache, &v_cache}, [&](auto unit) {
    const auto keys = arguments<decltype(unit)>(k_cache, nullptr), values = arguments<decltype(unit)>(v_cache, nullptr);
    const int64_t size = k_cache.size(1), count = size * (keys.heads * keys.width + values.heads * values.width);
    if (count == 0 || pairs.size(0) == 0) return;
    copy_blocks_kernel<<<blocks_of(count, kCopyThreads), kCopyThreads, 0, current_stream(k_cache)>>>(
        keys, values, pairs.const_data_ptr<int64_t>(), pairs.size(0), k_cache.size(0), size);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

}  // namespace
}  // namespace pyruntime::cuda

STABLE_TORCH_LIBRARY_IMPL(pyruntime, CUDA, m) {
  m.impl("store_kv", TORCH_BOX(&pyruntime::cuda::store_kv));
  m.impl("copy_blocks", TORCH_BOX(&pyruntime::cuda::copy_blocks));
}
