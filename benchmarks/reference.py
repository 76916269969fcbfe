"""What plain transformers says in float32 to the workload, and how far an engine's answers are from it.

A program of its own, so that torch is in no process that measures: ``python reference.py ANSWERS.json`` prints the
verdicts as JSON. Texts are run one by one: no padding, no batch, no cache.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from workload import LABELS, NEW_TOKENS, SHORT_TEXT, Workload, make_workload

#: Continuations are checked for so many streams: with each other's company, but not all of 64.
CHECKED_STREAMS = 8
OPTIONS = {"attn_implementation": "eager", "dtype": torch.float32}


class Reference:
    """Answers of the reference, those that the workload alone decides kept in ``made`` for the next run."""

    def __init__(self, models: dict[str, str], work: Workload) -> None:
        self._models, self._work = models, work
        folders = [models[name] for name in ("encoder", "reranker", "decoder")]
        digest = hashlib.sha256(json.dumps([asdict(work), folders]).encode()).hexdigest()[:16]
        self._kept = Path(models["made"]) / f"reference-{digest}"

    def distance(self, task: str, answers: list[Any]) -> float:
        """Of vectors and logits 1 - the least cosine; of log-probabilities the largest difference; of continuations
        the most by which a chosen token's log-probability is below the best one's. NaN if an answer is not finite.
        """
        if task.startswith("generate_"):
            return max(self._shortfall(prompt, tokens) for prompt, tokens in answers[:CHECKED_STREAMS])
        expected, given = self._known(task), numpy.asarray(answers, numpy.float64)
        if given.shape != expected.shape:
            raise ValueError(f"{task}: answers of shape {given.shape}, expected {expected.shape}")
        if task == "score":
            return float(abs(given - expected).max())
        given, expected = numpy.atleast_2d(given), numpy.atleast_2d(expected)
        lengths = numpy.linalg.norm(given, axis=1) * numpy.linalg.norm(expected, axis=1)
        return float(1 - ((given * expected).sum(1) / lengths).min())

    def _known(self, task: str) -> numpy.ndarray:
        path = self._kept / f"{task}.npy"
        if not path.exists():
            self._kept.mkdir(exist_ok=True)
            numpy.save(path, self._answers(task))
        return numpy.asarray(numpy.load(path), numpy.float64)

    def _answers(self, task: str) -> numpy.ndarray:
        if task in ("embed", "embed_one"):
            return self._vectors(self._work.embed_texts if task == "embed" else [SHORT_TEXT])
        return self._logits() if task == "rerank" else self._log_probabilities()

    @torch.inference_mode()
    def _vectors(self, texts: list[str]) -> numpy.ndarray:
        tokenizer = AutoTokenizer.from_pretrained(self._models["encoder"])
        body = AutoModel.from_pretrained(self._models["encoder"], **OPTIONS).eval()
        means = [body(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0) for text in texts]
        return torch.stack(means).numpy()

    @torch.inference_mode()
    def _logits(self) -> numpy.ndarray:
        tokenizer = AutoTokenizer.from_pretrained(self._models["reranker"])
        model = AutoModelForSequenceClassification.from_pretrained(self._models["reranker"], **OPTIONS).eval()
        query, documents = self._work.rerank_query, self._work.rerank_documents
        return numpy.array([model(**tokenizer(query, text, return_tensors="pt")).logits.item() for text in documents])

    @torch.inference_mode()
    def _log_probabilities(self) -> numpy.ndarray:
        tokenizer, model = self._decoder
        labels = [tokenizer.encode(label, add_special_tokens=False) for label in LABELS]
        rows = []
        for item in self._work.score_items:
            ids = tokenizer(f"0 {self._work.score_prefix} {item}", return_tensors="pt").input_ids
            logits = model(ids, logits_to_keep=1, use_cache=False).logits[0, -1]
            rows.append([logits.log_softmax(-1)[label[0]].item() for label in labels])
        return numpy.array(rows)

    @torch.inference_mode()
    def _shortfall(self, prompt: str, tokens: list[int]) -> float:
        if len(tokens) != NEW_TOKENS:
            raise ValueError(f"{len(tokens)} of {NEW_TOKENS} tokens")
        tokenizer, model = self._decoder
        ids = torch.tensor([[*tokenizer.encode(prompt), *tokens]])
        logits = model(ids[:, :-1], logits_to_keep=len(tokens), use_cache=False).logits[0]
        chosen = logits.gather(1, ids[0, -len(tokens) :, None])[:, 0]
        return float((logits.amax(1) - chosen).max())

    @cached_property
    def _decoder(self) -> tuple[Any, Any]:
        folder = self._models["decoder"]
        return AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder, **OPTIONS).eval()


def main() -> None:
    asked = json.loads(Path(sys.argv[1]).read_text())
    reference = Reference(asked["models"], make_workload().reduced(asked["share"]))
    verdicts = []
    for each in asked["answers"]:
        distance = reference.distance(each["task"], each.pop("answers"))
        verdicts.append({**each, "distance": distance if math.isfinite(distance) else None})
    print(json.dumps(verdicts))


if __name__ == "__main__":
    main()
