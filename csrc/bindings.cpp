// The module pyruntime._C: op schemas (each once, for every device) and facts about this build.
#include <pybind11/pybind11.h>

#include "checks.h"
#include "cpu/dispatch.h"

STABLE_TORCH_LIBRARY(pyruntime, m) {
  m.def(
      "packed_attention(Tensor q, Tensor k, Tensor v, Tensor starts, bool causal, float scale, int window_left, "
      "int window_right, float softcap, Tensor? sinks) -> Tensor");
  m.def(
      "paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor query_starts, Tensor kv_lengths, "
      "Tensor block_tables, bool causal, float scale, int window_left, float softcap, Tensor? sinks) -> Tensor");
  m.def("store_kv(Tensor k, Tensor v, Tensor slot_mapping, Tensor(a!) k_cache, Tensor(b!) v_cache) -> ()");
  m.def("copy_blocks(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor pairs) -> ()");
  m.def("pool(Tensor hidden, Tensor starts, Tensor kinds, Tensor dimensions, Tensor normalize) -> Tensor");
  m.def("label_logits(Tensor rows, Tensor weight, Tensor? bias, Tensor label_ids, Tensor label_starts) -> Tensor");
  m.def("logsumexp(Tensor rows, Tensor weight, Tensor? bias, float softcap, float scale) -> Tensor");
  m.def(
      "sample(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor seeds, "
      "Tensor positions, Tensor indices) -> Tensor");
  m.def("linear_rows(Tensor x, Tensor w, Tensor? bias) -> Tensor");
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
}
