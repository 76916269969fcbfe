// decoder_layer: a whole layer of a decoder over the paged cache, put together from the ops that it would take one by
// one. Between two of them nothing goes back to Python, which at few rows takes as long as the layer itself.
#include <algorithm>
#include <utility>
#include <vector>

#include "../checks.h"
#include "dispatch.h"
#include "int8_rows.h"
#include "ops.h"

namespace pyruntime {
namespace {

Tensor rows_of(const Tensor& heads) { return view_of(heads, {heads.size(0), heads.size(1) * heads.size(2)}); }

Tensor heads_of(const Tensor& rows, int64_t width) {
  return view_of(rows, {rows.size(0), rows.size(1) / width, width});
}

// What linears read. As int8 it is made once for all of them that want it so.
struct Input {
  const Tensor& x;
  std::optional<Int8Rows> packed{};

  const Int8Rows& as_int8() {
    if (!packed.has_value()) packed.emplace(x);
    return *packed;
  }
};

struct Layer {
  double epsilon, weight_offset;
  bool by_panels;

  Tensor norm(const Tensor& x, const Tensor& weight) const { return rms_norm(x, weight, epsilon, weight_offset); }

  Tensor norm_heads(const Tensor& x, const MaybeTensor& weight) const {
    if (!weight.has_value()) return x;
    const int64_t tokens = x.size(0), heads = x.size(1), width = x.size(2);
    return view_of(norm(view_of(x, {tokens * heads, width}), *weight), {tokens, heads, width});
  }

  // Four dimensions are a matrix in panels.
  bool is_by_panels(const Tensor& w) const { return w.dim() == 4 || (by_panels && w.dim() == 2); }

  Tensor linear(Input&& in, const Tensor& w, const MaybeTensor& bias, const MaybeTensor& up = std::nullopt,
                int64_t activation = 0) const {
    // Bytes are an int8 matrix, in whole panels.
    if (w.scalar_type() == ScalarType::Byte) return in.as_int8().multiply(w, w.size(0) * 16, bias, up, activation);
    return is_by_panels(w) ? linear_panels(in.x, w, bias, up, activation) : linear_rows(in.x, w, bias, up, activation);
  }

  // Each matrix with its bias, at once where there is a kernel for that.
  std::vector<Tensor> linears(Input&& in, const std::vector<std::pair<Tensor, MaybeTensor>>& matrices) const {
    const auto fits = [&](const auto& m) { return m.first.scalar_type() != ScalarType::Byte && is_by_panels(m.first); };
    if (std::all_of(matrices.begin(), matrices.end(), fits)) return linear_panels_of(in.x, matrices);
    std::vector<Tensor> all;
    for (const auto& [w, bias] : matrices) all.push_back(linear(std::move(in), w, bias));
    return all;
  }
};

Tensor decoder_layer(const Tensor x, const Tensor cos, const Tensor sin, Tensor k_cache, Tensor v_cache,
                     const Tensor slot_mapping, const Tensor query_starts, const Tensor kv_lengths,
                     const Tensor block_tables, const Tensor attention_norm, const Tensor q_weight,
                     const MaybeTensor q_bias, const Tensor k_weight, const MaybeTensor k_bias, const Tensor v_weight,
                     const MaybeTensor v_bias, const MaybeTensor q_norm, const MaybeTensor k_norm,
                     const Tensor o_weight, const MaybeTensor o_bias, const MaybeTensor after_attention,
                     const Tensor mlp_norm, const Tensor gate, const Tensor up, const Tensor down,
                     const MaybeTensor after_mlp, const MaybeTensor sinks, double epsilon, double weight_offset,
                     int64_t activation, double scale, int64_t window_left, double softcap, bool by_panels) {
  check_shape(x, "x", {-1, -1});
  check_shape(k_cache, "k_cache", {-1, -1, -1, -1});
  const Layer layer{epsilon, weight_offset, by_panels};
  const int64_t width = k_cache.size(3);
  require(width >= 1, "k_cache: heads must be at least one wide, got ", describe(k_cache));
  const Tensor normed = layer.norm(x, attention_norm);
  const std::vector<Tensor> rows =
      layer.linears({normed}, {{q_weight, q_bias}, {k_weight, k_bias}, {v_weight, v_bias}});
  const auto heads = [&](const Tensor& projected, const Tensor& w, const char* name) {
    require(projected.size(1) % width == 0, name, ": expected heads ", width, " wide, got ", describe(w));
    return heads_of(projected, width);
  };
  const Tensor q = layer.norm_heads(heads(rows[0], q_weight, "q_weight"), q_norm);
  const Tensor k = layer.norm_heads(heads(rows[1], k_weight, "k_weight"), k_norm);
  const Tensor v = heads(rows[2], v_weight, "v_weight");
  store_kv(rotate_halves(k, cos, sin), v, slot_mapping, k_cache, v_cache);
  const Tensor seen = paged_attention(rotate_halves(q, cos, sin), k_cache, v_cache, query_starts, kv_lengths,
                                      block_tables, true, scale, window_left, softcap, sinks);
  const Tensor attended = layer.linear({rows_of(seen)}, o_weight, o_bias);
  const Tensor middle = add_back(x, attended, after_attention, epsilon, weight_offset);
  const Tensor hidden = layer.linear({layer.norm(middle, mlp_norm)}, gate, std::nullopt, up, activation);
  return add_back(middle, layer.linear({hidden}, down, std::nullopt), after_mlp, epsilon, weight_offset);
}

}  // namespace
}  // namespace pyruntime

STABLE_TORCH_LIBRARY_IMPL(pyruntime, CPU, m) { m.impl("decoder_layer", TORCH_BOX(&pyruntime::decoder_layer)); }
