"""Embedding sequences: hidden rows → one vector each."""

from __future__ import annotations

import torch

from pyruntime.ops import pooling
from pyruntime.types import EmbeddingBatchResult, EmbedRequest, ForwardBatch, PoolingType, SequenceRows, Task


class Pooler:
    """Pools every embedding sequence of a batch in one kernel call.

    A prompt that was cut into chunks leaves behind the rows that its pooling needs later: all for
    MEAN, the first for CLS, none for LAST.
    """

    def keep_partial(self, hidden: torch.Tensor, rows: SequenceRows) -> None:
        """Remember rows of a chunk that is not the sequence's last."""
        sequence = rows.sequence
        pooling_type = sequence.payload.pooling
        own = hidden[rows.start : rows.start + rows.length]
        if pooling_type is PoolingType.MEAN:
            sequence.partial_hidden.append(own.clone())
        elif pooling_type is PoolingType.CLS and not sequence.partial_hidden:
            sequence.partial_hidden.append(own[:1].clone())

    def pool(self, hidden: torch.Tensor, batch: ForwardBatch) -> EmbeddingBatchResult:
        """One float32 vector for each reading EMBED row of the batch, in row order."""
        reading = [rows for rows in batch.rows if rows.task is Task.EMBED and rows.reads]
        whole = [rows for rows in reading if not rows.sequence.partial_hidden]
        vectors = dict(zip(map(id, whole), self._pool_whole(hidden, batch, whole), strict=True))
        for rows in reading:
            if rows.sequence.partial_hidden:
                vectors[id(rows)] = self._pool_chunked(hidden, rows)
        return EmbeddingBatchResult([_finite(vectors[id(rows)]) for rows in reading])

    def _pool_whole(self, hidden: torch.Tensor, batch: ForwardBatch, whole: list[SequenceRows]) -> list[torch.Tensor]:
        if not whole:
            return []
        wanted = set(map(id, whole))
        # Sequences of other tasks stand in the same packed rows; one element of their last row costs nothing.
        requests = [rows.sequence.payload if id(rows) in wanted else None for rows in batch.rows]
        pooled = _pool(hidden, batch.query_starts, requests)
        return [pooled[i, : request.dimensions] for i, request in enumerate(requests) if request is not None]

    def _pool_chunked(self, hidden: torch.Tensor, rows: SequenceRows) -> torch.Tensor:
        pieces = [*rows.sequence.partial_hidden, hidden[rows.start : rows.start + rows.length]]
        rows.sequence.partial_hidden = []
        joined = torch.cat(pieces)
        starts = torch.tensor([0, joined.shape[0]], dtype=torch.int32, device=hidden.device)
        request = rows.sequence.payload
        return _pool(joined, starts, [request])[0, : request.dimensions]


def _pool(hidden: torch.Tensor, starts: torch.Tensor, requests: list[EmbedRequest | None]) -> torch.Tensor:
    device = hidden.device
    kinds = [int(r.pooling) if r else int(PoolingType.LAST) for r in requests]
    widths = [r.dimensions if r else 1 for r in requests]
    normalize = [r.normalize if r else False for r in requests]
    return pooling.pool(
        hidden,
        starts,
        torch.tensor(kinds, dtype=torch.int32, device=device),
        torch.tensor(widths, dtype=torch.int32, device=device),
        torch.tensor(normalize, device=device),
    ).cpu()


def _finite(vector: torch.Tensor) -> object | None:
    return vector.numpy() if bool(torch.isfinite(vector).all()) else None
