// encoder_layer: a whole layer of an encoder over packed texts, whose norms end its halves as in BERT. Many rows go in
// blocks that stay in a thread's cache from the attention to the end of the layer; few are shared by their columns.
#include <algorithm>
#include <memory>
#include <vector>

#include "../attention_checks.h"
#include "../checks.h"
#include "dispatch.h"
#include "encoder_parts.h"
#include "linear.h"
#include "ops.h"
#include "scalars.h"

namespace pyruntime {
namespace {

using namespace encoder;

// Rows that a thread must have before it takes all the columns of them.
constexpr int64_t kRowsOfThread = 32;
// Bytes of a block of rows between the two halves of an MLP, which leave a cache of 1 MiB room for the weights.
constexpr int64_t kBlockBytes = 512 * 1024;
// Columns that a thread takes at once, where there are several threads.
constexpr int64_t kRun = 32, kAll = int64_t{1} << 32;

thread_local Kept kept_rows, kept_block;

// Rows [0, count) by columns: every thread takes some of the columns of all of them.
class ByColumns {
 public:
  ByColumns(const Layer& layer, int64_t count)
      : layer_(layer),
        count_(count),
        run_(torch::stable::get_num_threads() > 1 ? kRun : kAll),
        memory_(kept_block.take(layer.floats(count * (2 * layer.width() + layer.up.columns)) +
                                layer.quantized_floats(count, deepest(layer)))),
        quantized_(memory_->get() + layer.floats(count * (2 * layer.width() + layer.up.columns))) {}

  void project(const Rows& x, const Rows& to) const {
    struct Part {
      const Matrix* m;
      Rows to;
      int64_t begin, end;
    };
    std::vector<Part> parts;
    Rows own = to;
    for (const Matrix& m : layer_.heads) {
      for (int64_t c = 0; c < m.columns; c += run_) parts.push_back({&m, own, c, std::min(m.columns, c + run_)});
      own.data = layer_.at(own, 0, m.columns);
    }
    const QuantizeArgs q = quantize(x, layer_.heads[0].depth);
    for_each_neighbour(static_cast<int64_t>(parts.size()), [&](int64_t i) {
      const Part& p = parts[i];
      layer_.multiply(*p.m, x, q, p.to, Activation::kNone, 0, count_, p.begin, p.end);
    });
  }

  void finish(const Rows& x, const Rows& attended, const Rows& to) const {
    const int64_t width = layer_.width();
    const Rows added{memory_->get(), width}, middle{layer_.at(added, count_), width};
    const Rows hidden{layer_.at(middle, count_), layer_.up.columns};
    multiply(layer_.out, attended, added, Activation::kNone);
    layer_.normalize(layer_.attention_norm, added, x, middle, count_);
    multiply(layer_.up, middle, hidden, layer_.activation);
    multiply(layer_.down, hidden, added, Activation::kNone);
    layer_.normalize(layer_.mlp_norm, added, middle, to, count_);
  }

 private:
  static int64_t deepest(const Layer& layer) {
    return std::max({layer.heads[0].depth, layer.out.depth, layer.up.depth, layer.down.depth});
  }

  QuantizeArgs quantize(const Rows& x, int64_t depth) const {
    if (!layer_.is_int8()) return {};
    const QuantizeArgs q = layer_.quantized(x, count_, depth, quantized_);
    kernels().quantize_rows(q, 0, count_);
    return q;
  }

  void multiply(const Matrix& m, const Rows& x, const Rows& to, Activation act) const {
    const QuantizeArgs q = quantize(x, m.depth);
    for_each_neighbour((m.columns + run_ - 1) / run_, [&](int64_t i) {
      layer_.multiply(m, x, q, to, act, 0, count_, i * run_, std::min(m.columns, (i + 1) * run_));
    });
  }

  const Layer& layer_;
  int64_t count_, run_;
  std::shared_ptr<Scratch> memory_;
  float* quantized_;
};

// The same rows in blocks: a thread takes all the columns of one.
class ByRows {
 public:
  ByRows(const Layer& layer, int64_t count) : layer_(layer), count_(count) {
    const int64_t threads = static_cast<int64_t>(torch::stable::get_num_threads());
    const int64_t row = layer.size * (layer.up.columns + 2 * layer.width());
    const int64_t most = std::clamp<int64_t>(kBlockBytes / row / 8 * 8, 32, 256);
    // As many for every thread.
    blocks_ = (((count + most - 1) / most) + threads - 1) / threads * threads;
  }

  void project(const Rows& x, const Rows& to) const {
    const int64_t depth = layer_.heads[0].depth;
    for_each_block(layer_.quantized_floats(most(), depth), [&](int64_t first, int64_t rows, float* memory) {
      const Rows from{layer_.at(x, first), x.width};
      const QuantizeArgs q = quantize(from, rows, depth, memory);
      Rows own{layer_.at(to, first), to.width};
      for (const Matrix& m : layer_.heads) {
        layer_.multiply(m, from, q, own, Activation::kNone, 0, rows, 0, m.columns);
        own.data = layer_.at(own, 0, m.columns);
      }
    });
  }

  void finish(const Rows& x, const Rows& attended, const Rows& to) const {
    const int64_t width = layer_.width(), wide = layer_.up.columns;
    const int64_t deepest = std::max({layer_.out.depth, layer_.up.depth, layer_.down.depth});
    const int64_t kept = layer_.floats(most() * (2 * width + wide));
    for_each_block(kept + layer_.quantized_floats(most(), deepest), [&](int64_t first, int64_t rows, float* memory) {
      const Rows added{memory, width}, middle{layer_.at(added, rows), width}, hidden{layer_.at(middle, rows), wide};
      const auto multiply = [&](const Matrix& m, const Rows& from, const Rows& into, Activation act) {
        const QuantizeArgs q = quantize(from, rows, m.depth, memory + kept);
        layer_.multiply(m, from, q, into, act, 0, rows, 0, m.columns);
      };
      multiply(layer_.out, {layer_.at(attended, first), attended.width}, added, Activation::kNone);
      layer_.normalize(layer_.attention_norm, added, {layer_.at(x, first), x.width}, middle, rows);
      multiply(layer_.up, middle, hidden, layer_.activation);
      multiply(layer_.down, hidden, added, Activation::kNone);
      layer_.normalize(layer_.mlp_norm, added, middle, {layer_.at(to, first), to.width}, rows);
    });
  }

 private:
  int64_t most() const { return (count_ + blocks_ - 1) / blocks_; }

  QuantizeArgs quantize(const Rows& x, int64_t rows, int64_t depth, float* memory) const {
    if (!layer_.is_int8()) return {};
    const QuantizeArgs q = layer_.quantized(x, rows, depth, memory);
    kernels().quantize_rows(q, 0, rows);
    return q;
  }

  template <class Work>
  void for_each_block(int64_t floats, const Work& work) const {
    for_each_neighbour_of(blocks_, [&] {
      return [&, memory = kept_block.take(floats)](int64_t i) {
        const int64_t first = count_ * i / blocks_;
        work(first, count_ * (i + 1) / blocks_ - first, memory->get());
      };
    });
  }

  const Layer& layer_;
  int64_t count_, blocks_;
};

// Queries, keys and values side by side in `rows`.
void attend(const Layer& layer, const Rows& rows, const Tensor& starts, int64_t count, int64_t q_heads,
            int64_t kv_heads, double scale, int64_t window_left, int64_t window_right, const Rows& to) {
  check_windows(window_left, window_right);
  AttentionArgs a{};
  const auto& [q, k, v] = layer.heads;
  a.q = rows.data, a.k = layer.at(rows, 0, q.columns), a.v = layer.at(rows, 0, q.columns + k.columns);
  a.out = to.data, a.dtype = layer.dtype;
  a.q_heads = q_heads, a.kv_heads = kv_heads;
  a.key_width = q.columns / q_heads, a.value_width = v.columns / kv_heads;
  a.q_row = a.k_row = a.v_row = rows.width;
  a.q_head = a.k_head = a.key_width, a.v_head = a.value_width;
  a.query_starts = starts.const_data_ptr<int32_t>();
  a.scale = check_scale(scale);
  a.window_left = std::min(window_left, count), a.window_right = std::min(window_right, count);
  launch_attention(a, starts.size(0) - 1);
}

Tensor encoder_layer(const Tensor x, const Tensor starts, const Tensor q_weight, const MaybeTensor q_bias,
                     const Tensor k_weight, const MaybeTensor k_bias, const Tensor v_weight, const MaybeTensor v_bias,
                     const Tensor o_weight, const MaybeTensor o_bias, const Tensor attention_norm,
                     const Tensor attention_norm_bias, const Tensor up, const MaybeTensor up_bias, const Tensor down,
                     const MaybeTensor down_bias, const Tensor mlp_norm, const Tensor mlp_norm_bias,
                     double attention_epsilon, double mlp_epsilon, int64_t activation, int64_t heads, int64_t kv_heads,
                     double scale, int64_t window_left, int64_t window_right) {
  const DType dtype = check_floating(x, "x");
  check_shape(x, "x", {-1, -1});
  check_dense_rows(x, "x");
  check_starts(starts, "starts", x.size(0));
  const int64_t count = x.size(0), width = x.size(1);
  require(heads >= 1 && kv_heads >= 1 && heads % kv_heads == 0 && heads / kv_heads <= 64,
          "heads: must be at most 64 times kv_heads, and a multiple, got ", heads, " and ", kv_heads);
  const Matrix q(q_weight, q_bias, "q_weight", width, x), k(k_weight, k_bias, "k_weight", width, x);
  const Matrix v(v_weight, v_bias, "v_weight", width, x), high(up, up_bias, "up", width, x);
  require(q.columns % heads == 0 && q.columns / heads * kv_heads == k.columns && v.columns % kv_heads == 0,
          "heads: ", heads, " and ", kv_heads, " do not fit ", describe(q_weight), ", ", describe(k_weight), " and ",
          describe(v_weight));
  const int64_t seen = v.columns / kv_heads * heads;
  const Matrix o(o_weight, o_bias, "o_weight", seen, x), low(down, down_bias, "down", high.columns, x);
  require(o.columns == width && low.columns == width, "o_weight and down: expected ", width, " columns");
  for (const Matrix* m : {&k, &v, &o, &high, &low}) {
    require(m->is_int8 == q.is_int8, "q_weight: all matrices are int8, or none is");
  }
  PanelArgs kind{};
  kind.linear.dtype = dtype, kind.linear.depth = 1;
  require(q.is_int8 || kernels().panel_words(kind) > 0, "x: ", describe(x), " has no such kernel on this processor");
  const Layer layer{dtype,
                    static_cast<int64_t>(x.element_size()),
                    {q, k, v},
                    o,
                    high,
                    low,
                    {attention_norm, attention_norm_bias, "attention_norm", attention_epsilon, x},
                    {mlp_norm, mlp_norm_bias, "mlp_norm", mlp_epsilon, x},
                    check_activation(activation)};
  Tensor answer = empty_cpu({count, width}, x.scalar_type());
  if (count == 0) return answer;
  const int64_t wide = q.columns + k.columns + v.columns;
  const auto memory = kept_rows.take(layer.floats(count * wide) + layer.floats(count * seen));
  const Rows in{const_cast<void*>(x.const_data_ptr()), x.stride(0)}, to{answer.mutable_data_ptr(), width};
  const Rows projected{memory->get(), wide}, attended{memory->get() + layer.floats(count * wide), seen};
  const auto go = [&](const auto& way) {
    way.project(in, projected);
    attend(layer, projected, starts, count, heads, kv_heads, scale, window_left, window_right, attended);
    way.finish(in, attended, to);
  };
  if (count < kRowsOfThread * static_cast<int64_t>(torch::stable::get_num_threads())) {
    go(ByColumns(layer, count));
  } else {
    go(ByRows(layer, count));
  }
  return answer;
}

}  // namespace
}  // namespace pyruntime

STABLE_TORCH_LIBRARY_IMPL(pyruntime, CPU, m) { m.impl("encoder_layer", TORCH_BOX(&pyruntime::encoder_layer)); }
