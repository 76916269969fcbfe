// pool: checks, one sequence an item.
#include "../checks.h"
#include "dispatch.h"

namespace pyruntime {
namespace {

Tensor pool(const Tensor hidden, const Tensor starts, const Tensor kinds, const Tensor dimensions,
            const Tensor normalize) {
  PoolArgs a{};
  a.dtype = check_floating(hidden, "hidden");
  check_shape(hidden, "hidden", {-1, -1});
  check_dense_rows(hidden, "hidden");
  check_starts(starts, "starts", hidden.size(0));
  const int64_t sequences = starts.size(0) - 1;
  check_array(kinds, "kinds", ScalarType::Int, {sequences});
  check_array(dimensions, "dimensions", ScalarType::Int, {sequences});
  check_array(normalize, "normalize", ScalarType::Bool, {sequences});
  a.hidden = hidden.const_data_ptr();
  a.row_stride = hidden.stride(0), a.width = hidden.size(1);
  a.starts = starts.const_data_ptr<int32_t>();
  a.kinds = kinds.const_data_ptr<int32_t>();
  a.dimensions = dimensions.const_data_ptr<int32_t>();
  a.normalize = static_cast<const uint8_t*>(normalize.const_data_ptr());
  for (int64_t s = 0; s < sequences; ++s) {
    require(a.starts[s] < a.starts[s + 1], "starts: sequence ", s, " has no rows");
    require(a.kinds[s] >= 0 && a.kinds[s] <= 2, "kinds: entry ", s, " is ", a.kinds[s],
            ", expected 0 (LAST), 1 (CLS) or 2 (MEAN)");
    require(a.dimensions[s] >= 1 && a.dimensions[s] <= a.width, "dimensions: entry ", s, " is ", a.dimensions[s],
            ", expected 1 to ", a.width);
  }
  Tensor out = empty_cpu({sequences, a.width}, ScalarType::Float);
  a.out = out.mutable_data_ptr<float>();
  for_each_item(sequences, [&] { return [&](int64_t s) { kernels().pool(a, s); }; });
  return out;
}

}  // namespace
}  // namespace pyruntime

STABLE_TORCH_LIBRARY_IMPL(pyruntime, CPU, m) { m.impl("pool", TORCH_BOX(&pyruntime::pool)); }
