"""What the engines that run an exported graph share: the graphs, and batches of token ids as they take them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy
import tokenizers
import torch
from common import Job, Task, fastest, load_job, serve
from transformers import AutoModel, AutoModelForSequenceClassification
from workload import SHORT_TEXT

NAMES = ("input_ids", "attention_mask", "token_type_ids")
MAX_TOKENS = 256
EXAMPLE = tuple(torch.ones(2, 3, dtype=torch.long) for _ in NAMES)

Feed = dict[str, numpy.ndarray]


class Embedder(torch.nn.Module):
    """Mean-pooled, normalised vectors [B, H]: pooling inside the graph, so that no hidden states are copied out."""

    def __init__(self, body: torch.nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, input_ids, attention_mask, token_type_ids):
        hidden = self.body(
            input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids
        ).last_hidden_state
        kept = attention_mask.unsqueeze(-1).to(hidden.dtype)
        return torch.nn.functional.normalize((hidden * kept).sum(1) / kept.sum(1), dim=-1)


class Ranker(torch.nn.Module):
    """Logits [B, 1] of a cross-encoder."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask, token_type_ids):
        return self.model(input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids).logits


def module_for(task: str, job: Job, attention: str) -> torch.nn.Module:
    """The float32 module of ``embed`` or ``rerank``; ``attention``: transformers' name of an implementation."""
    options = {"attn_implementation": attention, "dtype": torch.float32}
    if task == "embed":
        return Embedder(AutoModel.from_pretrained(job.models["encoder"], **options)).eval()
    return Ranker(AutoModelForSequenceClassification.from_pretrained(job.models["reranker"], **options)).eval()


class Texts:
    """Encodes and batches as these engines' users do: sorted by length, each batch padded to its longest."""

    def __init__(self, folder: str) -> None:
        self._tokenizer = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json")
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(MAX_TOKENS)

    def batches(self, texts: list, size: int) -> Iterator[tuple[list[int], Feed]]:
        """(places in ``texts``, feed) of each batch, longest texts first. A text is a string or a pair of them."""
        encoded = self._tokenizer.encode_batch_fast(texts)
        order = sorted(range(len(texts)), key=lambda place: -len(encoded[place]))
        for start in range(0, len(order), size):
            places = order[start : start + size]
            yield places, self._feed([encoded[place] for place in places])

    def one(self, text: str) -> Feed:
        return self._feed([self._tokenizer.encode(text)])

    def _feed(self, encoded: list[tokenizers.Encoding]) -> Feed:
        feed = {name: numpy.zeros((len(encoded), len(encoded[0])), numpy.int64) for name in NAMES}
        for row, each in enumerate(encoded):
            feed["input_ids"][row, : len(each)] = each.ids
            feed["attention_mask"][row, : len(each)] = 1
            feed["token_type_ids"][row, : len(each)] = each.type_ids
        return feed


def in_order(parts: list[tuple[list[int], numpy.ndarray]]) -> list:
    """The rows of all batches, back in the order of the texts."""
    rows: dict[int, list] = {}
    for places, answers in parts:
        rows.update(zip(places, answers.tolist(), strict=True))
    return [rows[place] for place in sorted(rows)]


def serve_graphs(engine: str, version: str, make: Callable[[str, Job], Any], way: str, choices: list[Any]) -> None:
    """Embed and Rerank by what ``make`` gives for a task: ``run(texts, choice)`` in parts and ``one(text)``.

    A choice is a pair, the engine's own ``way`` of working and the texts a batch; the fastest is found first.
    """
    job = load_job()
    work = job.work
    tasks, settings = {}, {}
    if "embed" in job.tasks or "embed_one" in job.tasks:
        embedder = make("embed", job)
        embed_choice = fastest(choices, lambda choice: embedder.run(work.embed_texts, choice))
        settings[f"embed {way} and batch"] = embed_choice
        tasks["embed"] = Task(lambda _: embedder.run(work.embed_texts, embed_choice), in_order)
        tasks["embed_one"] = Task(lambda _: embedder.one(SHORT_TEXT), lambda vectors: vectors.tolist())
    if "rerank" in job.tasks:
        ranker = make("rerank", job)
        pairs = [(work.rerank_query, document) for document in work.rerank_documents]
        rerank_choice = fastest(choices, lambda choice: ranker.run(pairs, choice))
        settings[f"rerank {way} and batch"] = rerank_choice
        tasks["rerank"] = Task(
            lambda _: ranker.run(pairs, rerank_choice), lambda parts: [row[0] for row in in_order(parts)]
        )
    serve(engine, version, job, tasks, settings)
