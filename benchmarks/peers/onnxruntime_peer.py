"""ONNX Runtime on Embed and Rerank: float32, and int8 by its own dynamic quantisation (it has no bfloat16 on a CPU).

With its own fusions for BERT (attention, GELU, normalisation). One run on all cores or one a core at once, with batches
of 4 to 16: the fastest is found at the start. Of the ways to quantise, weights as int8 or uint8 and with or without
the embeddings were tried; the least cosine to float32 was 0.98 to 0.99 in all.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import onnx
import onnxruntime
import torch
from common import CORES, Job
from exported import EXAMPLE, NAMES, Texts, module_for, serve_graphs
from onnxruntime.quantization import QuantType, quantize_dynamic
from onnxruntime.transformers import optimizer

CHOICES = [(at_once, size) for at_once in (CORES, 1) for size in (4, 8, 16)]


def graph(task: str, job: Job) -> Path:
    """The ONNX file of ``task``, made on the first call."""
    path = Path(job.models["made"]) / f"{task}-{job.dtype}-{onnxruntime.__version__}.onnx"
    if path.exists():
        return path
    plain = path.with_suffix(".plain")
    axes = {name: {0: "batch", 1: "length"} for name in NAMES}
    module = module_for(task, job, "eager")
    # The exporter that traces: its graphs are what ONNX Runtime's fusions look for.
    torch.onnx.export(module, EXAMPLE, str(plain), input_names=list(NAMES), dynamic_axes=axes, dynamo=False)
    fused = path.with_suffix(".fused")
    optimizer.optimize_model(str(plain), "bert", num_heads=12, hidden_size=384).save_model_to_file(str(fused))
    if job.dtype == "int8":
        unknown = {"DefaultTensorType": onnx.TensorProto.FLOAT}  # what its own fused nodes answer
        quantize_dynamic(fused, path, weight_type=QuantType.QInt8, per_channel=True, extra_options=unknown)
    else:
        fused.rename(path)
    return path


class Graph:
    def __init__(self, task: str, job: Job) -> None:
        self.texts = Texts(job.models["encoder" if task == "embed" else "reranker"])
        self._sessions = {at_once: _session(graph(task, job), max(1, CORES // at_once)) for at_once in (CORES, 1)}
        self._threads = ThreadPoolExecutor(CORES)

    def run(self, texts: list, choice: tuple[int, int]) -> list:
        at_once, size = choice
        session = self._sessions[at_once]

        def one(part):
            places, feed = part
            return places, session.run(None, feed)[0]

        batches = self.texts.batches(texts, size)
        return list(map(one, batches) if at_once == 1 else self._threads.map(one, batches))

    def one(self, text: str):
        return self._sessions[1].run(None, self.texts.one(text))[0]


def _session(path: Path, threads: int) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


serve_graphs("onnxruntime", onnxruntime.__version__, Graph, "at once", CHOICES)
