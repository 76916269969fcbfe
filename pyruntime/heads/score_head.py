"""Scoring sequences: the last hidden row → probabilities of the request's labels as the next token."""

from __future__ import annotations

from itertools import accumulate

import torch

from pyruntime.model.output_head import OutputHead
from pyruntime.ops import scores
from pyruntime.types import ForwardBatch, ScoreRequest, ScoringBatchResult, SequenceRows, Task


class ScoreHead:
    """Reads label rows of the output matrix only; the whole vocabulary is streamed where it is asked for."""

    def __init__(self, head: OutputHead) -> None:
        self._head = head

    def score(self, hidden: torch.Tensor, batch: ForwardBatch) -> ScoringBatchResult:
        """One list of probabilities for each reading SCORE row of the batch, in row order."""
        reading = [rows for rows in batch.rows if rows.task is Task.SCORE and rows.reads]
        if not reading:
            return ScoringBatchResult([])
        last = hidden[torch.tensor([rows.start + rows.length - 1 for rows in reading], device=hidden.device)]
        logits = self._label_logits(last, reading)
        totals = self._vocabulary_totals(last, reading)
        requests = [rows.sequence.payload for rows in reading]
        return ScoringBatchResult(
            [_scores(request, logits[i], totals.get(i)) for i, request in enumerate(requests)],
        )

    def _label_logits(self, last: torch.Tensor, reading: list[SequenceRows]) -> list[torch.Tensor]:
        labels = [rows.sequence.payload.label_ids for rows in reading]
        counts = [len(ids) for ids in labels]
        ids = torch.tensor([label for each in labels for label in each], dtype=torch.int64, device=last.device)
        starts = torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=last.device)
        raw = scores.label_logits(last, self._head.weight, self._head.bias, ids, starts)
        return list(self._head.shape(raw).cpu().split(counts))

    def _vocabulary_totals(self, last: torch.Tensor, reading: list[SequenceRows]) -> dict[int, torch.Tensor]:
        """log Σ exp over the whole vocabulary, for the rows that are not normalised over their labels alone."""
        wanted = [i for i, rows in enumerate(reading) if not rows.sequence.payload.apply_softmax]
        if not wanted:
            return {}
        head = self._head
        rows = last[torch.tensor(wanted, device=last.device)]
        totals = scores.logsumexp(rows, head.weight, head.bias, softcap=head.softcap, scale=head.scale).cpu()
        return dict(zip(wanted, totals, strict=True))


def _scores(request: ScoreRequest, logits: torch.Tensor, total: torch.Tensor | None) -> list[float] | None:
    if total is None:
        # Differences first: a tiny temperature would overflow the logits themselves.
        values = torch.softmax((logits - logits.max()) / request.temperature, dim=-1)
    else:
        values = torch.exp(logits - total)
    return values.tolist() if bool(torch.isfinite(values).all()) else None
