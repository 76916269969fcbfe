"""The fork: each sequence's rows go to the head of its own task, within one batch."""

from __future__ import annotations

from typing import Any

import torch

from pyruntime.heads.classifier import CrossEncodingPooler
from pyruntime.heads.pooler import Pooler
from pyruntime.heads.prompt_logprobs import PromptHead
from pyruntime.heads.sampler import Sampler
from pyruntime.heads.score_head import ScoreHead
from pyruntime.model.loader import LoadedModel
from pyruntime.model.sentence import SentenceSettings
from pyruntime.types import ForwardBatch, SampledToken, Task


class Heads:
    """All heads of one model: a language model has all but the classifier, a plain encoder the pooler alone."""

    def __init__(self, loaded: LoadedModel, sentence: SentenceSettings) -> None:
        output_head = loaded.output_head
        self._pooler = Pooler(loaded, sentence)
        self._sampler = Sampler(output_head) if output_head is not None else None
        self._prompt_head = PromptHead(output_head) if output_head is not None else None
        self._score_head = ScoreHead(output_head) if output_head is not None else None
        self._classifier = CrossEncodingPooler(loaded.classifier) if loaded.classifier is not None else None

    @torch.inference_mode()
    def read(self, hidden: torch.Tensor, batch: ForwardBatch) -> list[Any]:
        """One output a reading row, in row order: sampled token, vector or label scores; None where not finite."""
        for rows in batch.rows:
            if rows.task is Task.EMBED and not rows.reads:
                self._pooler.keep_partial(hidden, batch, rows)
            if rows.task is Task.CLASSIFY and not rows.reads and self._classifier is not None:
                self._classifier.keep_partial(hidden, rows)
        outputs: dict[Task, Any] = {Task.EMBED: iter(self._pooler.pool(hidden, batch).embeddings)}
        if self._sampler is not None and self._score_head is not None:
            outputs[Task.GENERATE] = iter(self._generated(hidden, batch))
            outputs[Task.SCORE] = iter(self._score_head.score(hidden, batch).scores)
        if self._classifier is not None:
            outputs[Task.CLASSIFY] = iter(self._classifier.classify(hidden, batch).scores)
        return [next(outputs[rows.task]) for rows in batch.rows if rows.reads]

    def _generated(self, hidden: torch.Tensor, batch: ForwardBatch) -> list[SampledToken | None]:
        """Of each reading GENERATE row, with what the prompt's own rows say where that is asked for."""
        tokens: list[SampledToken | None] = self._sampler.sample(hidden, batch).tokens if self._sampler else []
        if self._prompt_head is None:
            return tokens
        self._prompt_head.keep_partial(hidden, batch)
        reading = [rows for rows in batch.rows if rows.task is Task.GENERATE and rows.reads]
        return [self._prompt_head.attach(token, rows) for token, rows in zip(tokens, reading, strict=True)]
