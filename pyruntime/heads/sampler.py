"""Generating sequences: the last hidden row → logits → the next token."""

from __future__ import annotations

import torch

from pyruntime.model.output_head import OutputHead
from pyruntime.ops import sampling
from pyruntime.types import ForwardBatch, GenerationBatchResult, SequenceRows, Task


class Sampler:
    """Samples all generating rows of a batch in one kernel call, each with its own parameters.

    A draw is a function of (seed, position, n-index) alone, so a request gives the same tokens
    whatever shares its batch.
    """

    def __init__(self, head: OutputHead) -> None:
        self._head = head

    def sample(self, hidden: torch.Tensor, batch: ForwardBatch) -> GenerationBatchResult:
        """The next token of each reading GENERATE row of the batch, in row order."""
        reading = [rows for rows in batch.rows if rows.task is Task.GENERATE and rows.reads]
        if not reading:
            return GenerationBatchResult([])
        last = hidden[torch.tensor([rows.start + rows.length - 1 for rows in reading], device=hidden.device)]
        logits = self._head.logits(last)
        _forbid_early_stops(logits, reading)
        ids = sampling.sample(logits, **_parameters(reading, hidden.device)).tolist()
        return GenerationBatchResult([token if token >= 0 else None for token in ids])


def _forbid_early_stops(logits: torch.Tensor, reading: list[SequenceRows]) -> None:
    for line, rows in enumerate(reading):
        stop = rows.sequence.payload.stop
        if stop.token_ids and rows.sequence.num_generated < stop.min_new_tokens:
            logits[line, torch.tensor(sorted(stop.token_ids), device=logits.device)] = -torch.inf


def _parameters(reading: list[SequenceRows], device: torch.device) -> dict[str, torch.Tensor]:
    settings = [rows.sequence.payload.sampling for rows in reading]

    def column(values: list, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return {
        "temperature": column([s.temperature for s in settings], torch.float32),
        "top_k": column([s.top_k for s in settings], torch.int32),
        "top_p": column([s.top_p for s in settings], torch.float32),
        "min_p": column([s.min_p for s in settings], torch.float32),
        "seeds": column([_signed(s.seed) for s in settings], torch.int64),
        "positions": column([len(rows.sequence) for rows in reading], torch.int64),
        "indices": column([rows.sequence.index for rows in reading], torch.int32),
    }


def _signed(seed: int) -> int:
    """The same 64 bits as a signed number, which is what an int64 tensor takes."""
    return seed - (1 << 64) if seed >= 1 << 63 else seed
