"""The log-probability of each token of a prompt, given those before it, and the likeliest tokens in its place."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch

from pyruntime.model.output_head import OutputHead
from pyruntime.ops import scores
from pyruntime.types import ForwardBatch, PromptLogprobs, SampledToken, SequenceRows, Task

# Logits that exist at one time while the likeliest tokens are looked for: 64 MiB of float32.
MOST_LOGITS = 2**24


class PromptHead:
    """Reads the prompt rows of generating sequences that ask for it.

    What a chunk gives is kept under the position that it begins at, so that a chunk that runs again takes the place of
    what it gave before; it stays until the job has the first token. The sums over the vocabulary are float32 whatever
    the model's dtype, and a row's numbers do not depend on how the prompt was cut.
    """

    def __init__(self, head: OutputHead) -> None:
        self._head = head

    def keep_partial(self, hidden: torch.Tensor, batch: ForwardBatch) -> None:
        """Read the rows of this step, of whole prompts and of chunks alike."""
        for rows in batch.rows:
            if _is_read(rows):
                self._keep(hidden, rows)

    def attach(self, token: SampledToken | None, rows: SequenceRows) -> SampledToken | None:
        """The token that follows the prompt, with all that was kept of it; None where that is not a number."""
        if token is None or not _is_read(rows):
            return token
        kept = [piece for _, piece in rows.sequence.partial_hidden]
        found = PromptLogprobs(*(np.concatenate(parts) for parts in zip(*kept, strict=True)))
        return None if np.isnan(found.logprobs).any() else token._replace(prompt=found)

    def _keep(self, hidden: torch.Tensor, rows: SequenceRows) -> None:
        sequence = rows.sequence
        start: int = sequence.num_computed
        end = min(start + rows.length, sequence.num_prompt - 1)  # of rows that have a prompt token behind them
        count = max(end - start, 0)
        wanted = min(sequence.payload.prompt_logprobs, self._head.weight.shape[0])
        own = hidden[rows.start : rows.start + count]
        following = torch.tensor(list(sequence.token_ids[start + 1 : start + 1 + count]), device=hidden.device)
        piece = self._read(own, following.to(torch.int64), wanted)
        earlier = [kept for kept in sequence.partial_hidden if kept[0] < start]
        sequence.partial_hidden = [*earlier, (start, piece)]

    def _read(self, own: torch.Tensor, following: torch.Tensor, wanted: int) -> tuple[np.ndarray, np.ndarray]:
        """ids int64 and logprobs float32, both [rows, 1 + wanted]."""
        count = own.shape[0]
        if not count:
            return np.zeros((0, 1 + wanted), np.int64), np.zeros((0, 1 + wanted), np.float32)
        head = self._head
        options: dict[str, Any] = {"softcap": head.softcap, "scale": head.scale}
        if not wanted:
            values = scores.token_logprobs(own, head.weight, head.bias, following, **options)
            return following[:, None].cpu().numpy(), values[:, None].cpu().numpy()
        ids = torch.cat([following[:, None], self._likeliest(own, wanted)], dim=1)
        starts = torch.arange(0, ids.numel() + 1, ids.shape[1], dtype=torch.int32, device=own.device)
        logits = head.shape(scores.label_logits(own, head.weight, head.bias, ids.flatten(), starts)).view(count, -1)
        values = logits - scores.logsumexp(own, head.weight, head.bias, **options)[:, None]
        order = torch.sort(values[:, 1:], dim=1, descending=True, stable=True).indices[:, :wanted]
        order = torch.cat([torch.zeros_like(order[:, :1]), order + 1], dim=1)
        return ids.gather(1, order).cpu().numpy(), values.gather(1, order).cpu().numpy()

    def _likeliest(self, own: torch.Tensor, wanted: int) -> torch.Tensor:
        """int64 [rows, candidates], ascending: more than wanted, for logits of the model's dtype tie or swap places.

        A bounded number of logits exists at a time.
        """
        vocab_size = self._head.weight.shape[0]
        step, count = max(1, MOST_LOGITS // vocab_size), min(2 * wanted + 8, vocab_size)
        bounds = [*range(0, own.shape[0], step), own.shape[0]]
        slices = [self._head.logits(own[first:last]) for first, last in pairwise(bounds)]
        return torch.cat([torch.sort(torch.topk(each, count, dim=1).indices, dim=1).values for each in slices])


def _is_read(rows: SequenceRows) -> bool:
    """The first continuation reads the prompt, until its first token is drawn."""
    if rows.task is not Task.GENERATE:
        return False
    sequence = rows.sequence
    wanted: bool = sequence.payload.prompt_logprobs is not None
    return wanted and sequence.index == 0 and sequence.num_generated == 0
