"""The parameters of many requests as the arrays that the sampling kernel takes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch


class Ahead:
    """A sequence as it will be once ``count`` drafts have been drawn, ``last`` the last of them.

    It has what the functions below read of a sequence; its history is that of the row before it and ``last``.
    """

    __slots__ = ("_length", "index", "last", "matcher", "num_generated", "payload")

    def __init__(self, sequence: Any, count: int, last: int) -> None:
        self.payload, self.index = sequence.payload, sequence.index
        self.matcher = sequence.matcher and sequence.matcher.foreseen[count - 1]
        self.num_generated = sequence.num_generated + count
        self.last = last
        self._length = len(sequence) + count

    def __len__(self) -> int:
        return self._length


def histories(sequence: Any, drafts: Sequence[int]) -> list[Any]:
    """What each of a sequence's rows is sampled after: its own tokens, then one draft more a row, in order."""
    return [sequence, *(Ahead(sequence, count, draft) for count, draft in enumerate(drafts, 1))]


def neighbours(hidden: torch.Tensor, last: list[int]) -> torch.Tensor | None:
    """``hidden[last]`` without a copy, where the rows follow each other as in a step of nothing but streams; on a CPU.

    Torch would share the copy among threads of its own, which then spin for a while beside those of the product.
    """
    first, count = last[0], len(last)
    return hidden[first : first + count] if not hidden.is_cuda and last == [*range(first, first + count)] else None


def wants_largest(sequence: Any) -> bool:
    """Whether a row's answer is the token of the largest logit as it is, and no more than that."""
    settings = sequence.payload.sampling
    is_greedy = settings.temperature == 0 and settings.logprobs is None and not settings.penalizes
    return is_greedy and sequence.matcher is None and not _biases(sequence)


def columns(sequences: list[Any]) -> dict[str, np.ndarray]:
    """What the kernel takes beside the logits, by its names, one row a sequence: what every row has, and penalties,
    biases and constraints where a row of the batch has any; nothing else pays for them."""
    return _parameters(sequences) | _extras(sequences)


def _parameters(sequences: list[Any]) -> dict[str, np.ndarray]:
    """Temperature, filters, and what the draw is a function of; each [B]."""
    settings = [sequence.payload.sampling for sequence in sequences]
    return {
        "temperature": np.array([s.temperature for s in settings], np.float32),
        "top_k": np.array([s.top_k for s in settings], np.int32),
        "top_p": np.array([s.top_p for s in settings], np.float32),
        "min_p": np.array([s.min_p for s in settings], np.float32),
        "seeds": np.array([_signed(s.seed) for s in settings], np.int64),
        "positions": np.array([len(sequence) for sequence in sequences], np.int64),
        "indices": np.array([sequence.index for sequence in sequences], np.int32),
    }


def _extras(sequences: list[Any]) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    settings = [sequence.payload.sampling for sequence in sequences]
    if any(s.penalizes for s in settings):
        found["repetition"] = np.array([s.repetition_penalty for s in settings], np.float32)
        found["frequency"] = np.array([s.frequency_penalty for s in settings], np.float32)
        found["presence"] = np.array([s.presence_penalty for s in settings], np.float32)
        seen = _all_seen(sequences)
        found["seen_ids"], found["seen_starts"] = _ragged([ids for ids, _ in seen], np.int64)
        found["seen_generated"], _ = _ragged([counts for _, counts in seen], np.int32)
    biases = [_biases(sequence) for sequence in sequences]
    if any(biases):
        found["bias_ids"], found["bias_starts"] = _ragged([[i for i, _ in each] for each in biases], np.int64)
        found["bias_values"], _ = _ragged([[value for _, value in each] for each in biases], np.float32)
    if any(sequence.matcher is not None for sequence in sequences):
        found["bitmask"] = _bitmask(sequences)
    return found


_NOTHING: tuple[Any, Any] = ([], [])


def _all_seen(sequences: list[Any]) -> list[tuple[np.ndarray, np.ndarray]]:
    """``_seen`` of each row that is penalised, with no tokens for the others."""
    found: list[tuple[Any, Any]] = []
    for sequence in sequences:
        if not sequence.payload.sampling.penalizes:
            found.append(_NOTHING)
        elif isinstance(sequence, Ahead):
            found.append(_seen_also(*found[-1], sequence.last))
        else:
            found.append(_seen(sequence))
    return found


def _seen_also(ids: np.ndarray, counts: np.ndarray, token_id: int) -> tuple[np.ndarray, np.ndarray]:
    """What has been seen when ``token_id`` is generated next."""
    place = int(np.searchsorted(ids, token_id))
    if place == len(ids) or ids[place] != token_id:
        ids, counts = np.insert(ids, place, token_id), np.insert(counts, place, 0)
    counts = counts.copy()
    counts[place] += 1
    return ids, counts


def _seen(sequence: Any) -> tuple[np.ndarray, np.ndarray]:
    """(ids ascending, how often each was generated) of all tokens of prompt and continuation."""
    ids = np.array(sequence.token_ids, dtype=np.int64)
    distinct = np.unique(ids)
    counts = np.zeros(len(distinct), dtype=np.int32)
    generated, times = np.unique(ids[sequence.num_prompt :], return_counts=True)
    counts[np.searchsorted(distinct, generated)] = times
    return distinct, counts


def _biases(sequence: Any) -> list[tuple[int, float]]:
    """logit_bias by ascending id; stop tokens get -inf until ``min_new_tokens`` have come."""
    request = sequence.payload
    biases = dict(request.sampling.logit_bias)
    if sequence.num_generated < request.stop.min_new_tokens:
        biases.update(dict.fromkeys(request.stop.token_ids, -np.inf))
    return sorted(biases.items())


def _bitmask(sequences: list[Any]) -> np.ndarray:
    """int32 [B, ceil(V / 32)]: what each row's constraint lets through; everything where there is none."""
    masks = [None if sequence.matcher is None else sequence.matcher.mask for sequence in sequences]
    width = next(len(mask) for mask in masks if mask is not None)
    rows = np.full((len(masks), width), -1, dtype=np.int32)
    for row, mask in zip(rows, masks, strict=True):
        if mask is not None:
            row[:] = mask
    return rows


def _ragged(rows: list[Any], dtype: type[np.generic]) -> tuple[np.ndarray, np.ndarray]:
    """(all values behind each other, starts int32 [B + 1])."""
    starts = np.array([0, *accumulate(len(row) for row in rows)], np.int32)
    return np.concatenate([np.asarray(row, dtype) for row in rows]), starts


def _signed(seed: int) -> int:
    """The same 64 bits as a signed number, which is what an int64 tensor takes."""
    return seed - (1 << 64) if seed >= 1 << 63 else seed
