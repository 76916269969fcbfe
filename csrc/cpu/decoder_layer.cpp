// decoder_layer: a whole layer of a decoder over the paged cache, put together from the ops that it would take one by
// one. Between two of them nothing goes back to Python, which at few rows takes as long as the layer itself. And
// decoder_stack: all layers of a model, whose weights make_decoder_stack has taken, so that the interpreter, which
// others want meanwhile, is asked for nothing until the last one's rows are there.
#include <algorithm>
#include <memory>
#include <mutex>
#include <unordered_map>
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

// One layer's part of what decoder_layer takes.
struct Weights {
  Tensor attention_norm, q_weight;
  MaybeTensor q_bias;
  Tensor k_weight;
  MaybeTensor k_bias;
  Tensor v_weight;
  MaybeTensor v_bias, q_norm, k_norm;
  Tensor o_weight;
  MaybeTensor o_bias, after_attention;
  Tensor mlp_norm, gate, up, down;
  MaybeTensor after_mlp, sinks;
  double epsilon, weight_offset;
  int64_t activation;
  double scale;
  int64_t window_left;
  double softcap;
};

// What a step's layers have in common.
struct Step {
  const Tensor& slot_mapping;
  const Tensor& query_starts;
  const Tensor& kv_lengths;
  const Tensor& block_tables;
  bool by_panels;
};

Tensor compute(const Weights& w, const Tensor& x, const Tensor& cos, const Tensor& sin, const Tensor& k_cache,
               const Tensor& v_cache, const Step& step) {
  check_shape(x, "x", {-1, -1});
  check_shape(k_cache, "k_cache", {-1, -1, -1, -1});
  const Layer layer{w.epsilon, w.weight_offset, step.by_panels};
  const int64_t width = k_cache.size(3);
  require(width >= 1, "k_cache: heads must be at least one wide, got ", describe(k_cache));
  const Tensor normed = layer.norm(x, w.attention_norm);
  const std::vector<Tensor> rows =
      layer.linears({normed}, {{w.q_weight, w.q_bias}, {w.k_weight, w.k_bias}, {w.v_weight, w.v_bias}});
  const auto heads = [&](const Tensor& projected, const Tensor& weight, const char* name) {
    require(projected.size(1) % width == 0, name, ": expected heads ", width, " wide, got ", describe(weight));
    return heads_of(projected, width);
  };
  const Tensor q = layer.norm_heads(heads(rows[0], w.q_weight, "q_weight"), w.q_norm);
  const Tensor k = layer.norm_heads(heads(rows[1], w.k_weight, "k_weight"), w.k_norm);
  const Tensor v = heads(rows[2], w.v_weight, "v_weight");
  store_kv(rotate_halves(k, cos, sin), v, step.slot_mapping, k_cache, v_cache);
  const Tensor seen = paged_attention(rotate_halves(q, cos, sin), k_cache, v_cache, step.query_starts, step.kv_lengths,
                                      step.block_tables, true, w.scale, w.window_left, w.softcap, w.sinks);
  const Tensor attended = layer.linear({rows_of(seen)}, w.o_weight, w.o_bias);
  const Tensor middle = add_back(x, attended, w.after_attention, w.epsilon, w.weight_offset);
  const Tensor hidden = layer.linear({layer.norm(middle, w.mlp_norm)}, w.gate, std::nullopt, w.up, w.activation);
  return add_back(middle, layer.linear({hidden}, w.down, std::nullopt), w.after_mlp, w.epsilon, w.weight_offset);
}

Tensor decoder_layer(const Tensor x, const Tensor cos, const Tensor sin, Tensor k_cache, Tensor v_cache,
                     const Tensor slot_mapping, const Tensor query_starts, const Tensor kv_lengths,
                     const Tensor block_tables, const Tensor attention_norm, const Tensor q_weight,
                     const MaybeTensor q_bias, const Tensor k_weight, const MaybeTensor k_bias, const Tensor v_weight,
                     const MaybeTensor v_bias, const MaybeTensor q_norm, const MaybeTensor k_norm,
                     const Tensor o_weight, const MaybeTensor o_bias, const MaybeTensor after_attention,
                     const Tensor mlp_norm, const Tensor gate, const Tensor up, const Tensor down,
                     const MaybeTensor after_mlp, const MaybeTensor sinks, double epsilon, double weight_offset,
                     int64_t activation, double scale, int64_t window_left, double softcap, bool by_panels) {
  const Weights weights{attention_norm, q_weight, q_bias,  k_weight,        k_bias,     v_weight, v_bias,      q_norm,
                        k_norm,         o_weight, o_bias,  after_attention, mlp_norm,   gate,     up,          down,
                        after_mlp,      sinks,    epsilon, weight_offset,   activation, scale,    window_left, softcap};
  return compute(weights, x, cos, sin, k_cache, v_cache,
                 {slot_mapping, query_starts, kv_lengths, block_tables, by_panels});
}

// All layers of a model, with which of the angles at hand each rotates by.
struct Stack {
  std::vector<Weights> layers;
  std::vector<int64_t> angles;
};

// Stacks by number. A step keeps the one that it runs, whoever drops it meanwhile.
class Stacks {
 public:
  int64_t keep(Stack stack) {
    const std::lock_guard lock(mutex_);
    stacks_.emplace(++last_, std::make_shared<const Stack>(std::move(stack)));
    return last_;
  }
  void drop(int64_t number) {
    const std::lock_guard lock(mutex_);
    stacks_.erase(number);
  }
  std::shared_ptr<const Stack> at(int64_t number) {
    const std::lock_guard lock(mutex_);
    const auto found = stacks_.find(number);
    require(found != stacks_.end(), "stack: there is none of number ", number);
    return found->second;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<int64_t, std::shared_ptr<const Stack>> stacks_;
  int64_t last_ = 0;
};

Stacks& stacks() {
  static Stacks* all = new Stacks;  // what a stack holds must not go after torch has
  return *all;
}

int64_t make_decoder_stack(const std::vector<MaybeTensor> tensors, const std::vector<double> numbers,
                           const std::vector<int64_t> settings) {
  constexpr size_t kTensors = 18, kNumbers = 4, kSettings = 3;
  const size_t count = tensors.size() / kTensors;
  require(
      count * kTensors == tensors.size() && count * kNumbers == numbers.size() && count * kSettings == settings.size(),
      "tensors, numbers and settings: expected ", kTensors, ", ", kNumbers, " and ", kSettings, " a layer");
  Stack stack;
  for (size_t i = 0; i < count; ++i) {
    const MaybeTensor* t = tensors.data() + i * kTensors;
    for (const size_t needed : {0, 1, 3, 5, 9, 12, 13, 14, 15}) {
      require(t[needed].has_value(), "tensors: layer ", i, " lacks its ", needed);
    }
    const double* n = numbers.data() + i * kNumbers;
    const int64_t* s = settings.data() + i * kSettings;
    stack.layers.push_back({*t[0],  *t[1],  t[2],   *t[3],  t[4],  *t[5], t[6], t[7], t[8], *t[9], t[10], t[11],
                            *t[12], *t[13], *t[14], *t[15], t[16], t[17], n[0], n[1], s[0], n[2],  s[1],  n[3]});
    require(s[2] >= 0, "settings: angles must be at least 0, got ", s[2]);
    stack.angles.push_back(s[2]);
  }
  return stacks().keep(std::move(stack));
}

Tensor decoder_stack(const Tensor x, const std::vector<Tensor> cos, const std::vector<Tensor> sin,
                     std::vector<Tensor> k_caches, std::vector<Tensor> v_caches, const Tensor slot_mapping,
                     const Tensor query_starts, const Tensor kv_lengths, const Tensor block_tables, int64_t stack,
                     bool by_panels) {
  const std::shared_ptr<const Stack> all = stacks().at(stack);
  const size_t count = all->layers.size();
  require(k_caches.size() == count && v_caches.size() == count, "k_caches and v_caches: expected one for each of ",
          count, " layers");
  require(cos.size() == sin.size(), "sin: expected as many as cos");
  const Step step{slot_mapping, query_starts, kv_lengths, block_tables, by_panels};
  Tensor rows = x;
  for (size_t i = 0; i < count; ++i) {
    const size_t angles = static_cast<size_t>(all->angles[i]);
    require(angles < cos.size(), "cos: layer ", i, " rotates by the angles ", angles, ", of ", cos.size());
    rows = compute(all->layers[i], rows, cos[angles], sin[angles], k_caches[i], v_caches[i], step);
  }
  return rows;
}

}  // namespace

void drop_decoder_stack(int64_t number) { stacks().drop(number); }

}  // namespace pyruntime

STABLE_TORCH_LIBRARY_IMPL(pyruntime, CPU, m) {
  m.impl("decoder_layer", TORCH_BOX(&pyruntime::decoder_layer));
  m.impl("make_decoder_stack", TORCH_BOX(&pyruntime::make_decoder_stack));
  m.impl("decoder_stack", TORCH_BOX(&pyruntime::decoder_stack));
}
