"""Scoring sequences: the last hidden row → probabilities of the request's labels as the next token."""

from __future__ import annotations

from itertools import accumulate

import torch

from pyruntime.model.output_head import OutputHead
from pyruntime.ops import scores
from pyruntime.types import ForwardBatch, ScoringBatchResult, SequenceRows, Task

# Below float32's normal numbers a division overflows; here the answer is one-hot already.
LEAST_TEMPERATURE = torch.finfo(torch.float32).tiny


class ScoreHead:
    """Reads label rows of the output matrix only; the whole vocabulary is streamed where it is asked for."""

    def __init__(self, head: OutputHead) -> None:
        self._head = head

    def score(self, hidden: torch.Tensor, batch: ForwardBatch) -> ScoringBatchResult:
        """One list of probabilities for each reading SCORE row of the batch, in row order."""
        reading = [rows for rows in batch.rows if rows.task is Task.SCORE and rows.reads]
        found: dict[int, list[float] | None] = {}
        for over_labels in (True, False):
            chosen = [rows for rows in reading if rows.sequence.payload.apply_softmax is over_labels]
            if chosen:
                found.update(zip(map(id, chosen), self._probabilities(hidden, chosen, over_labels), strict=True))
        return ScoringBatchResult([found[id(rows)] for rows in reading])

    def _probabilities(
        self, hidden: torch.Tensor, chosen: list[SequenceRows], over_labels: bool
    ) -> list[list[float] | None]:
        """``over_labels``: normalised over the labels, at the request's temperature; else over the vocabulary."""
        head, device = self._head, hidden.device
        requests = [rows.sequence.payload for rows in chosen]
        last = hidden[torch.tensor([rows.last for rows in chosen], device=device)]
        counts = [len(request.label_ids) for request in requests]
        ids = torch.tensor([label for request in requests for label in request.label_ids], device=device)
        starts = torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=device)
        options = {"softcap": head.softcap, "scale": head.scale}
        if over_labels:
            temperature = torch.tensor([max(r.temperature, LEAST_TEMPERATURE) for r in requests], device=device)
            values = scores.label_scores(last, head.weight, head.bias, ids, starts, temperature, **options)
        else:
            values = scores.label_probabilities(last, head.weight, head.bias, ids, starts, **options)
        return [own.tolist() if bool(torch.isfinite(own).all()) else None for own in values.cpu().split(counts)]
