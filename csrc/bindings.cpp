// The module pyruntime._C: op schemas (each once, for every device) and facts about this build.
#include <pybind11/pybind11.h>

#include "checks.h"
#include "cpu/dispatch.h"
#include "cpu/ops.h"

STABLE_TORCH_LIBRARY(pyruntime, m) {
  m.def(
      "packed_attention(Tensor q, Tensor k, Tensor v, Tensor starts, bool causal, float scale, int window_left, "
      "int window_right, float softcap, Tensor? sinks) -> Tensor");
  m.def(
      "paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor query_starts, Tensor kv_lengths, "
      "Tensor block_tables, bool causal, float scale, int window_left, float softcap, Tensor? sinks) -> Tensor");
  m.def("store_kv(Tensor k, Tensor v, Tensor slot_mapping, Tensor(a!) k_cache, Tensor(b!) v_cache) -> ()");
  m.def("copy_blocks(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor pairs) -> ()");
  m.def(
      "pool(Tensor hidden, Tensor starts, Tensor kinds, Tensor dimensions, Tensor normalize, Tensor? rows=None) -> "
      "Tensor");
  m.def("pool_sparse(Tensor hidden, Tensor starts, Tensor weight, Tensor? bias=None) -> Tensor");
  // Answers of unknown length have the longest possible one, and say in `starts` [S + 1] how much of it counts: nothing
  // has to be read back from a device to allocate them. The rest is filled with -1 (ids, rows) and 0 (weights).
  m.def(
      "lexical_weights(Tensor hidden, Tensor starts, Tensor token_ids, Tensor weight, float bias, Tensor skip) -> "
      "(Tensor ids, Tensor weights, Tensor starts)");
  m.def("delimiter_rows(Tensor input_ids, Tensor starts, int delimiter) -> (Tensor rows, Tensor starts)");
  m.def("label_logits(Tensor rows, Tensor weight, Tensor? bias, Tensor label_ids, Tensor label_starts) -> Tensor");
  m.def(
      "label_scores(Tensor rows, Tensor weight, Tensor? bias, Tensor label_ids, Tensor label_starts, "
      "Tensor temperature, *, float softcap=0.0, float scale=1.0) -> Tensor");
  m.def(
      "label_probabilities(Tensor rows, Tensor weight, Tensor? bias, Tensor label_ids, Tensor label_starts, *, "
      "float softcap=0.0, float scale=1.0) -> Tensor");
  m.def(
      "token_logprobs(Tensor rows, Tensor weight, Tensor? bias, Tensor token_ids, *, float softcap=0.0, "
      "float scale=1.0) -> Tensor");
  m.def("logsumexp(Tensor rows, Tensor weight, Tensor? bias, float softcap, float scale) -> Tensor");
  // top_logprobs -1: no logprobs at all, and the last three answers are empty ([0], [B, 0], [B, 0]); 0: the drawn
  // token's alone. The ids of a row in seen_ids and in bias_ids are strictly ascending.
  m.def(
      "sample(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor seeds, "
      "Tensor positions, Tensor indices, *, Tensor? repetition=None, Tensor? frequency=None, Tensor? presence=None, "
      "Tensor? seen_ids=None, Tensor? seen_generated=None, Tensor? seen_starts=None, Tensor? bias_ids=None, "
      "Tensor? bias_values=None, Tensor? bias_starts=None, Tensor? bitmask=None, int top_logprobs=-1) -> "
      "(Tensor ids, Tensor logprobs, Tensor top_ids, Tensor top_logprobs)");
  m.def("rms_norm(Tensor x, Tensor weight, float epsilon, float weight_offset=0.0) -> Tensor");
  m.def("layer_norm(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float epsilon) -> Tensor");
  m.def("rotate_halves(Tensor x, Tensor cos, Tensor sin) -> Tensor");
  m.def("linear_rows(Tensor x, Tensor w, Tensor? bias, Tensor? up=None, int activation=0) -> Tensor");
  m.def("linear_panels(Tensor x, Tensor w, Tensor? bias, Tensor? up=None, int activation=0) -> Tensor");
  m.def(
      "decoder_layer(Tensor x, Tensor cos, Tensor sin, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, "
      "Tensor query_starts, Tensor kv_lengths, Tensor block_tables, Tensor attention_norm, Tensor q_weight, "
      "Tensor? q_bias, Tensor k_weight, Tensor? k_bias, Tensor v_weight, Tensor? v_bias, Tensor? q_norm, "
      "Tensor? k_norm, Tensor o_weight, Tensor? o_bias, Tensor? after_attention, Tensor mlp_norm, Tensor gate, "
      "Tensor up, Tensor down, Tensor? after_mlp, Tensor? sinks, float epsilon, float weight_offset, int activation, "
      "float scale, int window_left, float softcap, bool by_panels) -> Tensor");
  // Of each layer `tensors` holds what decoder_layer takes from attention_norm to sinks, `numbers` epsilon,
  // weight_offset, scale and softcap, `settings` activation, window_left and which of the angles it rotates by. The
  // answer is the number of the stack, until drop_decoder_stack.
  m.def("make_decoder_stack(Tensor?[] tensors, float[] numbers, int[] settings) -> int");
  m.def(
      "decoder_stack(Tensor x, Tensor[] cos, Tensor[] sin, Tensor(a!)[] k_caches, Tensor(b!)[] v_caches, "
      "Tensor slot_mapping, Tensor query_starts, Tensor kv_lengths, Tensor block_tables, int stack, bool by_panels) "
      "-> Tensor");
  m.def(
      "encoder_layer(Tensor x, Tensor starts, Tensor q_weight, Tensor? q_bias, Tensor k_weight, Tensor? k_bias, "
      "Tensor v_weight, Tensor? v_bias, Tensor o_weight, Tensor? o_bias, Tensor attention_norm, "
      "Tensor attention_norm_bias, Tensor up, Tensor? up_bias, Tensor down, Tensor? down_bias, Tensor mlp_norm, "
      "Tensor mlp_norm_bias, float attention_epsilon, float mlp_epsilon, int activation, int heads, int kv_heads, "
      "float scale, int window_left, int window_right) -> Tensor");
  m.def("linear_into(Tensor x, Tensor w, Tensor? bias, bool by_panels, Tensor(a!) out) -> ()");
  m.def("linear_int8(Tensor x, Tensor w, int columns, Tensor? bias=None, Tensor? up=None, int activation=0) -> Tensor");
  m.def("linear_int8_into(Tensor x, Tensor w, Tensor? bias, Tensor(a!) out) -> ()");
  m.def(
      "largest_columns(Tensor x, Tensor w, Tensor screen, Tensor errors, Tensor lengths) -> (Tensor ids, Tensor "
      "values)");
}

namespace {

pybind11::dict build_info() {
  pybind11::dict facts;
  facts["version"] = PYRUNTIME_VERSION;
  facts["cuda"] = PYRUNTIME_BUILT_CUDA == 1;
  facts["compiler"] = "g++ " __VERSION__;
  facts["torch_version"] = PYRUNTIME_TORCH_VERSION;
  facts["cpu_capability"] = pyruntime::kernels().name;
  return facts;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Compiled ops of pyruntime; importing it registers torch.ops.pyruntime.*";
  m.def(
      "build_info", &build_info,
      "Facts about this build: version, cuda (bool), compiler, torch_version (built against), and cpu_capability (the "
      "instruction set chosen on this machine).");
  m.def("drop_decoder_stack", &pyruntime::drop_decoder_stack,
        "The layers that make_decoder_stack has given this number are let go.");
}
