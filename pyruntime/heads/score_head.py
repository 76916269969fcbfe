"""Scoring sequences: the last hidden row → probabilities, or logits, of the request's labels as the next token."""

from __future__ import annotations

from itertools import accumulate

import torch

from pyruntime.model.output_head import OutputHead
from pyruntime.ops import scores
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
        head, device = self._head, hidden.device
        requests = [rows.sequence.payload for rows in chosen]
        last = hidden[torch.tensor([rows.last for rows in chosen], device=device)]
        counts = [len(request.label_ids) for request in requests]
        ids = torch.tensor([label for request in requests for label in request.label_ids], device=device)
        starts = torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=device)
        options = {"softcap": head.softcap, "scale": head.scale}
        if form == "raw":
            values = head.shape(scores.label_logits(last, head.weight, head.bias, ids, starts))
        elif form == "labels":
            temperature = torch.tensor([max(r.temperature, LEAST_TEMPERATURE) for r in requests], device=device)
            values = scores.label_scores(last, head.weight, head.bias, ids, starts, temperature, **options)
        else:
            values = scores.label_probabilities(last, head.weight, head.bias, ids, starts, **options)
        return [own.tolist() if bool(torch.isfinite(own).all()) else None for own in values.cpu().split(counts)]


def _form(request: ScoreRequest) -> str:
    if request.raw:
        return "raw"
    return "labels" if request.apply_softmax else "vocabulary"
