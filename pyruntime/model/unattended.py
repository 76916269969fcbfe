"""Last tokens that the others of their text do not see, though they see the others: ColBERT's appended mask tokens.

Their keys and values count for nobody, their own included; their queries attend to the text before them. In the packed
batch each text is cut in two at its first such token, which gives the text's own rows the right answer, and the few
rows behind are attended here. Source: Khattab and Zaharia 2020, ColBERT, section 3.2, as PyLate and
sentence-transformers mask it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pyruntime.types import ForwardBatch, Task


@dataclass(frozen=True, slots=True)
class Unattended:
    """``spans``: (start, first, end) of each text with such tokens, which are rows first to end. ``starts``: cut so."""

    spans: list[tuple[int, int, int]]
    starts: torch.Tensor


def unattended_of(batch: ForwardBatch) -> Unattended | None:
    """What ``EmbedRequest.unattended`` says of a batch's texts; None where it says nothing."""
    counts = [_count(rows) for rows in batch.rows]
    if not any(counts):
        return None
    spans, bounds = [], [0]
    for rows, count in zip(batch.rows, counts, strict=True):
        end = rows.start + rows.length
        if count:
            spans.append((rows.start, end - count, end))
            bounds.append(end - count)
        bounds.append(end)
    return Unattended(spans, torch.tensor(bounds, dtype=torch.int32, device=batch.query_starts.device))


def attend_behind(
    output: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spans: list[tuple[int, int, int]],
    scale: float,
    window: int,
) -> None:
    """Overwrite the rows of ``output`` [T, Hq, Dv] that stand behind their texts. q [T, Hq, D], k and v [T, Hk, ·].

    ``window``: how far a row sees to either side, which must reach the text; -1: all of it.
    """
    group = q.shape[1] // k.shape[1]
    for start, first, end in spans:
        keys, values = (each[start:first].float().repeat_interleave(group, dim=1) for each in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[first:end].float(), keys) * scale
        if window >= 0:
            rows = torch.arange(start, end, device=q.device)
            far = rows[first - start :, None] - rows[None, : first - start] > window
            scores = scores.masked_fill(far, torch.finfo(torch.float32).min)
        output[first:end] = torch.einsum("hqk,khd->qhd", torch.softmax(scores, dim=-1), values).to(output.dtype)


def _count(rows: Any) -> int:
    if rows.task is not Task.EMBED or rows.sequence.payload is None:
        return 0
    counts = rows.sequence.payload.unattended
    return counts[rows.sequence.index] if counts is not None else 0
