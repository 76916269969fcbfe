"""Scoring sequences: the last hidden row → probabilities, or logits, of the request's labels as the next token."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import torch

from pyruntime.model.output_head import OutputHead
from pyruntime.ops import scores
from pyruntime.placing import place
from pyruntime.types import ForwardBatch, ScoreRequest, ScoringBatchResult, SequenceRows, Task

# Below float32's normal numbers a division overflows; here the answer is one-hot already.
LEAST_TEMPERATURE = torch.finfo(torch.float32).tiny


class ScoreHead:
    """Reads label rows of the output matrix only; the whole vocabulary is streamed where it is asked for."""

    def __init__(self, head: OutputHead) -> None:
        self._head = head

    def score(self, hidden: torch.Tensor, batch: ForwardBatch) -> ScoringBatchResult:
        """One list, a number a label, for each reading SCORE row of the batch, in row order."""
        reading = [rows for rows in batch.rows if rows.task is Task.SCORE and rows.reads]
        found: dict[int, list[float] | None] = {}
        for form in ("raw", "labels", "vocabulary"):
            chosen = [rows for rows in reading if _form(rows.sequence.payload) == form]
            if chosen:
                found.update(zip(map(id, chosen), self._scores(hidden, chosen, form), strict=True))
        return ScoringBatchResult([found[id(rows)] for rows in reading])

    def _scores(self, hidden: torch.Tensor, chosen: list[SequenceRows], form: str) -> list[list[float] | None]:
        """``form``: logits (raw), or normalised over the labels, at the request's temperature, or the vocabulary."""
        head = self._head
        requests = [rows.sequence.payload for rows in chosen]
        counts = [len(request.label_ids) for request in requests]
        arrays = {
            "last": np.array([rows.last for rows in chosen]),
            "ids": np.array([label for request in requests for label in request.label_ids], np.int64),
            "starts": np.array([0, *accumulate(counts)], np.int32),
            "temperature": np.array([max(r.temperature, LEAST_TEMPERATURE) for r in requests], np.float32),
        }
        placed = place(arrays, hidden.device)
        last, ids, starts = hidden[placed["last"]], placed["ids"], placed["starts"]
        options = {"softcap": head.softcap, "scale": head.scale}
        if form == "raw":
            values = head.shape(scores.label_logits(last, head.weight, head.bias, ids, starts))
        elif form == "labels":
            values = scores.label_scores(last, head.weight, head.bias, ids, starts, placed["temperature"], **options)
        else:
            values = scores.label_probabilities(last, head.weight, head.bias, ids, starts, **options)
        return [own.tolist() if bool(torch.isfinite(own).all()) else None for own in values.cpu().split(counts)]


def _form(request: ScoreRequest) -> str:
    if request.raw:
        return "raw"
    return "labels" if request.apply_softmax else "vocabulary"
