"""Embedding sequences: hidden rows → one vector each, or what the other kinds of embedding ask for."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from pyruntime.errors import ModelLoadError
from pyruntime.heads.sparse import SparseHead, sparse_head
from pyruntime.heads.tokens import TokenHead, cut_and_normalize
from pyruntime.model.loader import LoadedModel
from pyruntime.model.sentence import SentenceSettings
from pyruntime.ops import pooling
from pyruntime.placing import place
from pyruntime.types import (
    EmbeddingBatchResult,
    EmbeddingKind,
    EmbedRequest,
    ForwardBatch,
    PoolingType,
    SequenceRows,
    Task,
)


class Pooler:
    """Pools every dense embedding sequence of a batch in one kernel call; the other kinds have heads of their own.

    A prompt that was cut into chunks leaves behind the rows that its pooling needs later: all for MEAN, the first
    for CLS, none for LAST. The modules behind pooling run whatever pooling a request asks for.
    """

    def __init__(self, loaded: LoadedModel, sentence: SentenceSettings) -> None:
        if sentence.rows_width is not None and sentence.rows_width[0] != loaded.hidden_size:
            width, file = sentence.rows_width
            raise ModelLoadError(f"{file}: takes rows of {width}, but {loaded.architecture} gives {loaded.hidden_size}")
        _check_expansion(loaded, sentence)
        projection = sentence.projection
        self._project = projection.steps.to(loaded.device) if projection is not None else None
        self._sparse: SparseHead | None = sparse_head(loaded, sentence)
        self._tokens = TokenHead(loaded, sentence)

    def keep_partial(self, hidden: torch.Tensor, batch: ForwardBatch, rows: SequenceRows) -> None:
        """Remember rows of a chunk that is not the sequence's last."""
        sequence = rows.sequence
        request = sequence.payload
        own = hidden[rows.start : rows.start + rows.length]
        if request.kind is EmbeddingKind.PER_TOKEN:
            self._tokens.keep_partial(hidden, batch, rows)
        elif request.pooling is PoolingType.MEAN or _num_skipped(rows):
            sequence.partial_hidden.append(own.clone())
        elif request.pooling is PoolingType.CLS and not sequence.partial_hidden:
            sequence.partial_hidden.append(own[:1].clone())

    def pool(self, hidden: torch.Tensor, batch: ForwardBatch) -> EmbeddingBatchResult:
        """What ``EmbedResult.values`` says for each reading EMBED row of the batch, in row order."""
        reading = [rows for rows in batch.rows if rows.task is Task.EMBED and rows.reads]
        if not reading:
            return EmbeddingBatchResult([])
        by_kind: dict[EmbeddingKind, list[SequenceRows]] = {}
        for rows in reading:
            by_kind.setdefault(rows.sequence.payload.kind, []).append(rows)
        found: dict[int, object | None] = {}
        for kind, chosen in by_kind.items():
            found.update(zip(map(id, chosen), self._read(kind, hidden, batch, chosen), strict=True))
        return EmbeddingBatchResult([found[id(rows)] for rows in reading])

    def _read(
        self, kind: EmbeddingKind, hidden: torch.Tensor, batch: ForwardBatch, chosen: list[SequenceRows]
    ) -> list[object | None]:
        if kind is EmbeddingKind.PER_TOKEN:
            return self._tokens.read(hidden, batch, chosen)
        if kind is EmbeddingKind.SPARSE:
            if self._sparse is None:
                raise ValueError("the model has no sparse embeddings")
            return self._sparse.read(hidden, batch, chosen)
        vectors = self._dense(hidden, chosen)
        return [vector if good else None for vector, good in zip(vectors, _are_finite(vectors), strict=True)]

    def _dense(self, hidden: torch.Tensor, chosen: list[SequenceRows]) -> list[np.ndarray]:
        whole = [rows for rows in chosen if not rows.sequence.partial_hidden]
        pooled = dict(zip(map(id, whole), self._pool(hidden, whole, [rows.start for rows in whole]), strict=True))
        for rows in chosen:
            if rows.sequence.partial_hidden:
                pieces = [*rows.sequence.partial_hidden, hidden[rows.start : rows.start + rows.length]]
                rows.sequence.partial_hidden = []
                joined = torch.cat(pieces)
                pooled[id(rows)] = self._pool(joined, [rows], [0], joined.shape[0])[0]
        vectors = [pooled[id(rows)] for rows in chosen]
        if self._project is None:
            return vectors
        requests = [rows.sequence.payload for rows in chosen]
        projected = self._project(torch.from_numpy(np.stack(vectors)).to(hidden.device))
        finished = cut_and_normalize(projected, [r.dimensions for r in requests], [r.normalize for r in requests])
        return [row[: r.dimensions] for row, r in zip(finished.numpy(), requests, strict=True)]

    def _pool(
        self, hidden: torch.Tensor, chosen: list[SequenceRows], starts: list[int], length: int | None = None
    ) -> list[np.ndarray]:
        """One vector for each of ``chosen``, whose rows begin at ``starts``; finished unless modules come behind."""
        spans = _Spans(hidden.shape[1], finished=self._project is None)
        for rows, start in zip(chosen, starts, strict=True):
            spans.add(rows.sequence.payload, start, start + (length or rows.length), _num_skipped(rows))
        if not chosen:
            return []
        return spans.pool(hidden)


@dataclass(slots=True)
class _Spans:
    """The kernel's arguments. Rows that nobody pools (other tasks', skipped prompts) are spans of their own between.

    One element of such a span's last row costs nothing.
    """

    width: int
    finished: bool
    bounds: list[int] = field(default_factory=lambda: [0])
    kinds: list[int] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)
    normalize: list[bool] = field(default_factory=list)
    wanted: list[tuple[int, int, bool]] = field(default_factory=list)

    def add(self, request: EmbedRequest, start: int, end: int, skipped: int) -> None:
        """A sequence at rows ``start`` to ``end``, its first ``skipped`` left out of the pooling.

        Where nothing is left, as sentence-transformers does: CLS takes the first row, the others a zero vector.
        """
        nothing_left = skipped >= end - start
        first = start + (0 if nothing_left else skipped)
        width = request.dimensions if self.finished else self.width
        if first > self.bounds[-1]:
            self._append(first, PoolingType.LAST, 1, False)
        self.wanted.append((len(self.kinds), width, nothing_left and request.pooling is not PoolingType.CLS))
        self._append(end, request.pooling, width, request.normalize and self.finished)

    def _append(self, end: int, kind: PoolingType, width: int, normalize: bool) -> None:
        self.bounds.append(end)
        self.kinds.append(int(kind))
        self.widths.append(width)
        self.normalize.append(normalize)

    def pool(self, hidden: torch.Tensor) -> list[np.ndarray]:
        if self.bounds[-1] < hidden.shape[0]:
            self._append(hidden.shape[0], PoolingType.LAST, 1, False)
        columns = {"starts": self.bounds, "kinds": self.kinds, "dimensions": self.widths}
        arrays = {name: np.array(values, np.int32) for name, values in columns.items()}
        arrays["normalize"] = np.array(self.normalize, np.bool_)
        pooled = pooling.pool(hidden, **place(arrays, hidden.device))
        matrix = pooled.cpu().numpy()
        return [np.zeros(width, np.float32) if is_zero else matrix[i, :width] for i, width, is_zero in self.wanted]


def _are_finite(vectors: list[np.ndarray]) -> list[bool]:
    """Of each, of any width. All at once: one at a time takes longer than pooling them."""
    if len(vectors) == 1:
        return [bool(np.isfinite(vectors[0]).all())]
    starts = np.cumsum([0, *(len(vector) for vector in vectors[:-1])])
    found: list[bool] = np.logical_and.reduceat(np.isfinite(np.concatenate(vectors)), starts).tolist()
    return found


def _check_expansion(loaded: LoadedModel, sentence: SentenceSettings) -> None:
    """Appended tokens that see nothing within a layer's window would be made of nothing."""
    expansion = sentence.query_expansion
    windows = [traits.window for traits in loaded.layers.values() if traits.window is not None]
    if expansion is not None and not expansion.attended and windows and min(windows) < expansion.length:
        problem = f"query_expansion of {expansion.length} tokens that are not attended, in a window of {min(windows)}"
        raise ModelLoadError(f"{loaded.architecture}: {problem}, is not served")


def _num_skipped(rows: SequenceRows) -> int:
    skips = rows.sequence.payload.skip_rows
    return skips[rows.sequence.index] if skips is not None else 0
