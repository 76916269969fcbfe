"""OpenVINO on Embed and Rerank, from the models' own float32 weights, in bfloat16 or float32.

Tried: graphs from eager attention, by way of ONNX and without (no faster than those from SDPA, which are measured);
one request on all cores or one a core at once, with batches of 4 to 64. Short batches hold the least padding; which is
fastest of 4 to 16, and of the two ways, is found at the start.
"""

from __future__ import annotations

import openvino
from common import Job
from exported import EXAMPLE, NAMES, Texts, module_for, serve_graphs

CHOICES = [(mode, size) for mode in ("THROUGHPUT", "LATENCY") for size in (4, 8, 16)]
PRECISION = {"bfloat16": "bf16", "float32": "f32"}


class Graph:
    """One model, compiled for many texts at once and for one at a time."""

    def __init__(self, task: str, job: Job) -> None:
        self.texts = Texts(job.models["encoder" if task == "embed" else "reranker"])
        model = openvino.convert_model(module_for(task, job, "sdpa"), example_input=EXAMPLE)
        options = {"INFERENCE_PRECISION_HINT": PRECISION[job.dtype]}
        self._compiled = {
            mode: openvino.Core().compile_model(model, "CPU", {**options, "PERFORMANCE_HINT": mode})
            for mode in ("THROUGHPUT", "LATENCY")
        }
        self._queues = {mode: openvino.AsyncInferQueue(compiled) for mode, compiled in self._compiled.items()}
        self._request = self._compiled["LATENCY"].create_infer_request()

    def run(self, texts: list, choice: tuple[str, int]) -> list:
        mode, size = choice
        queue, parts = self._queues[mode], []
        queue.set_callback(lambda request, places: parts.append((places, request.get_output_tensor(0).data.copy())))
        for places, feed in self.texts.batches(texts, size):
            queue.start_async([feed[name] for name in NAMES], places)
        queue.wait_all()
        return parts

    def one(self, text: str):
        feed = self.texts.one(text)
        return self._request.infer([feed[name] for name in NAMES], share_inputs=True)[0].copy()


serve_graphs("openvino", openvino.__version__, Graph, "mode", CHOICES)
