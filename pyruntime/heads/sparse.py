"""Sparse embeddings: weights of vocabulary entries, by SPLADE or by BGE-M3's lexical head."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Protocol

import torch

from pyruntime.model.lexical import LexicalHeads
from pyruntime.model.loader import LoadedModel
from pyruntime.model.masked_lm import MaskedLMHead, masked_lm_head
from pyruntime.model.sentence import SentenceSettings, SpladeSettings
from pyruntime.ops import pooling
from pyruntime.types import ForwardBatch, SequenceRows, SparseVector


class SparseHead(Protocol):
    def read(self, hidden: torch.Tensor, batch: ForwardBatch, chosen: list[SequenceRows]) -> list[object | None]:
        """A ``SparseVector`` for each of ``chosen``, None where not finite. All their tokens are in ``hidden``."""
        ...


def sparse_head(loaded: LoadedModel, sentence: SentenceSettings) -> SparseHead | None:
    """The head that the folder asks for, or None. Raises ``ModelLoadError`` where the model lacks what it reads."""
    if sentence.splade is not None:
        return SpladeHead(masked_lm_head(loaded.model), sentence.splade)
    if sentence.lexical is not None:
        return LexicalHead(sentence.lexical, loaded.dtype, loaded.device)
    return None


class SpladeHead:
    """max over a text's tokens of log(1 + relu(logit)) for every entry, or of its log(1 + ·) once more.

    Both are monotone, so the second logarithm is taken of the largest alone.
    """

    def __init__(self, head: MaskedLMHead, settings: SpladeSettings) -> None:
        self._head = head
        self._settings = settings

    def read(self, hidden: torch.Tensor, batch: ForwardBatch, chosen: list[SequenceRows]) -> list[object | None]:
        rows, starts, _ = _gathered(hidden, batch, chosen)
        head = self._head
        found = pooling.pool_sparse(head.transform(rows), starts, head.weight, head.bias)
        return [self._vector(ids, weights) for ids, weights in found]

    def _vector(self, ids: torch.Tensor, weights: torch.Tensor) -> object | None:
        most = self._settings.max_entries
        if self._settings.log_twice:
            weights = weights.log1p()
        if most is not None and weights.shape[0] > most:
            kept = weights.topk(most).indices.sort().values
            ids, weights = ids[kept], weights[kept]
        return _sparse(ids.cpu(), weights.cpu())


class LexicalHead:
    """BGE-M3: relu(w · h + b) of each token, the largest of equal ids, special tokens left out."""

    def __init__(self, heads: LexicalHeads, dtype: torch.dtype, device: str) -> None:
        self._weight = heads.weight.to(device=device, dtype=dtype)
        self._bias = heads.bias
        self._skipped = torch.tensor(heads.skipped_ids, dtype=torch.int64).to(device)

    def read(self, hidden: torch.Tensor, batch: ForwardBatch, chosen: list[SequenceRows]) -> list[object | None]:
        rows, starts, token_ids = _gathered(hidden, batch, chosen)
        ids, weights, bounds = pooling.lexical_weights(rows, starts, token_ids, self._weight, self._bias, self._skipped)
        ids, weights, ends = ids.cpu(), weights.cpu(), bounds.tolist()
        return [_sparse(ids[a:b], weights[a:b]) for a, b in pairwise(ends)]


def _gathered(
    hidden: torch.Tensor, batch: ForwardBatch, chosen: list[SequenceRows]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The rows of ``chosen`` behind each other, their starts int32 [S + 1], and their token ids."""
    starts = torch.tensor([0, *accumulate(rows.length for rows in chosen)], dtype=torch.int32, device=hidden.device)
    spans = [slice(rows.start, rows.start + rows.length) for rows in chosen]
    if sum(rows.length for rows in chosen) == hidden.shape[0]:
        return hidden, starts, batch.input_ids
    ids = torch.cat([batch.input_ids[span] for span in spans])
    return torch.cat([hidden[span] for span in spans]), starts, ids


def _sparse(ids: torch.Tensor, weights: torch.Tensor) -> object | None:
    return SparseVector(ids.numpy(), weights.numpy()) if bool(torch.isfinite(weights).all()) else None
