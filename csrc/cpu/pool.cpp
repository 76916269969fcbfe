// pool: checks, one sequence an item; where sequences are fewer than threads, a part of its columns.
#include "../checks.h"
#include "dispatch.h"

namespace pyruntime {
namespace {

void check_sequence(const PoolArgs& a, int64_t s) {
  const int64_t begin = a.starts[s], end = a.starts[s + 1];
  require(begin < end, "starts: sequence ", s, " has no rows");
  require(a.kinds[s] >= 0 && a.kinds[s] <= 3, "kinds: entry ", s, " is ", a.kinds[s],
          ", expected 0 (LAST), 1 (CLS), 2 (MEAN) or 3 (ROW)");
  require(a.dimensions[s] >= 1 && a.dimensions[s] <= a.width, "dimensions: entry ", s, " is ", a.dimensions[s],
          ", expected 1 to ", a.width);
  if (a.kinds[s] != 3) return;
  require(a.rows != nullptr, "rows: needed, for kinds entry ", s, " is 3 (ROW)");
  require(a.rows[s] >= begin && a.rows[s] < end, "rows: entry ", s, " is ", a.rows[s], ", outside its sequence, rows ",
          begin, " to ", end - 1);
}

Tensor pool(const Tensor hidden, const Tensor starts, const Tensor kinds, const Tensor dimensions,
            const Tensor normalize, const std::optional<Tensor> rows) {
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
  if (rows.has_value()) {
    check_array(*rows, "rows", ScalarType::Long, {sequences});
    a.rows = rows->const_data_ptr<int64_t>();
  }
  for (int64_t s = 0; s < sequences; ++s) check_sequence(a, s);
  Tensor out = empty_cpu({sequences, a.width}, ScalarType::Float);
  a.out = out.mutable_data_ptr<float>();
  // Work that is over before a second thread has woken up is not shared.
  constexpr int64_t kPart = 256, kSmall = 1 << 16;
  if (hidden.size(0) * a.width <= kSmall) {
    for (int64_t s = 0; s < sequences; ++s) kernels().pool(a, s, 0, a.width), kernels().normalize(a, s);
  } else if (sequences >= static_cast<int64_t>(torch::stable::get_num_threads())) {
    for_each_item(sequences,
                  [&] { return [&](int64_t s) { kernels().pool(a, s, 0, a.width), kernels().normalize(a, s); }; });
  } else {
    const int64_t parts = (a.width + kPart - 1) / kPart;
    for_each_item(sequences * parts, [&] {
      return [&](int64_t i) {
        const int64_t begin = i % parts * kPart;
        kernels().pool(a, i / parts, begin, std::min(a.width, begin + kPart));
      };
    });
    for (int64_t s = 0; s < sequences; ++s) kernels().normalize(a, s);
  }
  return out;
}

}  // namespace
}  // namespace pyruntime

STABLE_TORCH_LIBRARY_IMPL(pyruntime, CPU, m) { m.impl("pool", TORCH_BOX(&pyruntime::pool)); }
