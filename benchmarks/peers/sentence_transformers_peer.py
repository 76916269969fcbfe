"""sentence-transformers on Embed and Rerank: it sorts by length and pads each batch, as its users have it.

Tried: batches of 8 to 64 (the fastest is found at the start); torch's own threads, one a core.
"""

from __future__ import annotations

import sentence_transformers
import torch
from common import Task, fastest, load_job, serve
from workload import SHORT_TEXT

BATCHES = [8, 16, 32, 64]

job = load_job()
texts = job.work.embed_texts
pairs = [(job.work.rerank_query, document) for document in job.work.rerank_documents]
kwargs = {"device": "cpu", "model_kwargs": {"dtype": getattr(torch, job.dtype)}}
tasks, settings = {}, {}

if "embed" in job.tasks or "embed_one" in job.tasks:
    embedder = sentence_transformers.SentenceTransformer(job.models["encoder"], **kwargs)

    def embed(size: int):
        return embedder.encode(texts, batch_size=size)

    settings["embed batch"] = fastest(BATCHES, embed)
    tasks["embed"] = Task(lambda _: embed(settings["embed batch"]), lambda vectors: vectors.tolist())
    tasks["embed_one"] = Task(lambda _: embedder.encode([SHORT_TEXT]), lambda vectors: vectors.tolist())

if "rerank" in job.tasks:
    ranker = sentence_transformers.CrossEncoder(job.models["reranker"], activation_fn=torch.nn.Identity(), **kwargs)

    def rerank(size: int):
        return ranker.predict(pairs, batch_size=size)

    settings["rerank batch"] = fastest(BATCHES, rerank)
    tasks["rerank"] = Task(lambda _: rerank(settings["rerank batch"]), lambda scores: scores.tolist())

serve("sentence-transformers", sentence_transformers.__version__, job, tasks, settings)
