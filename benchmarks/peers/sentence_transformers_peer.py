"""sentence-transformers on Embed: it sorts by length and pads each batch, as its users have it."""

from __future__ import annotations

import statistics
import time

import sentence_transformers
import torch
from common import best_seconds, load_job, report

job, work = load_job()
engine = {"engine": "sentence-transformers", "version": sentence_transformers.__version__, "dtype": job["dtype"]}
model = sentence_transformers.SentenceTransformer(
    job["encoder"], device="cpu", model_kwargs={"dtype": getattr(torch, job["dtype"])}
)

texts = work.embed_texts
seconds = best_seconds(lambda: model.encode(texts, batch_size=32), job["repeats"])
report(**engine, task="embed", texts_per_s=len(texts) / seconds)

milliseconds = []
for _ in range(100 * job["repeats"] + 20):
    start = time.perf_counter()
    model.encode(["how long does a request wait in the queue"])
    milliseconds.append((time.perf_counter() - start) * 1e3)
report(**engine, task="embed_one", p50_ms=statistics.median(milliseconds[20:]))
