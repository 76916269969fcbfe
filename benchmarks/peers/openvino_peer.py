"""OpenVINO on Embed and Rerank, from the models' own float32 weights, in bfloat16 or float32.

Tried: graphs from eager attention, by way of ONNX and without (no faster than those from SDPA, which are measured);
one request on all cores or one a core at once, with batches of 4 to 64. Short batches hold the least padding; which is
fastest of 4 to 16, and of the two ways, is found at the start.
"""

from __future__ import annotations

import openvino
from common import Job, Task, fastest, load_job, serve
from exported import EXAMPLE, NAMES, Texts, in_order, module_for
from workload import SHORT_TEXT

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


job = load_job()
work = job.work
tasks, settings = {}, {}
if "embed" in job.tasks or "embed_one" in job.tasks:
    embedder = Graph("embed", job)
    settings["embed mode and batch"] = embed_choice = fastest(CHOICES, lambda c: embedder.run(work.embed_texts, c))
    tasks["embed"] = Task(lambda _: embedder.run(work.embed_texts, embed_choice), in_order)
    tasks["embed_one"] = Task(lambda _: embedder.one(SHORT_TEXT), lambda vectors: vectors.tolist())
if "rerank" in job.tasks:
    ranker = Graph("rerank", job)
    pairs = [(work.rerank_query, document) for document in work.rerank_documents]
    settings["rerank mode and batch"] = rerank_choice = fastest(CHOICES, lambda c: ranker.run(pairs, c))
    tasks["rerank"] = Task(
        lambda _: ranker.run(pairs, rerank_choice), lambda parts: [row[0] for row in in_order(parts)]
    )

serve("openvino", openvino.__version__, job, tasks, settings)
