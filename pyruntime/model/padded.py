"""The padded forward: encoders whose attention is their own, run as transformers runs them.

The same ``ForwardBatch`` goes in and the same packed hidden rows come out; between, texts of about one length stand
padded beside each other under an attention mask. Positions are the model's own: it is given none.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from pyruntime.model.unattended import unattended_of
from pyruntime.types import ForwardBatch

# Rows of padding that cost about as much as one more forward of a small model.
MOST_PADDING = 48
# Bounds the score matrices, of which such models keep several: texts x length x length, each for every head.
MOST_SCORES = 1 << 22


def length_groups(lengths: list[int], one_by_one: bool) -> list[list[int]]:
    """Which sequences run together: indexes into ``lengths``, longest first, none left out.

    A group wastes at most ``MOST_PADDING`` rows and its scores stay within ``MOST_SCORES``, one text alone excepted.
    """
    groups: list[list[int]] = []
    longest = wasted = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        wasted += longest - lengths[index]
        fits = wasted <= MOST_PADDING and groups and (len(groups[-1]) + 1) * longest * longest <= MOST_SCORES
        if fits and not one_by_one:
            groups[-1].append(index)
        else:
            groups.append([index])
            longest, wasted = lengths[index], 0
    return groups


@torch.inference_mode()
def run_padded(
    body: Any, batch: ForwardBatch, token_types: torch.Tensor | None, padding_id: int | None, one_by_one: bool
) -> torch.Tensor:
    """ids [T] → last hidden rows [T, H].

    ``token_types``: int64 [T]. ``one_by_one``: no text shares a forward, so none can change another's bits.
    """
    starts = batch.query_starts.tolist()
    unseen = _unseen(batch)
    groups = length_groups([end - begin for begin, end in pairwise(starts)], one_by_one)
    hidden: torch.Tensor | None = None
    for group in groups:
        rows, mask = _padded_rows(starts, group, batch.input_ids.device)
        keywords = {} if token_types is None else {"token_type_ids": token_types[rows]}
        ids = batch.input_ids[rows].masked_fill(~mask, padding_id or 0)
        seen = mask if unseen is None else mask & ~unseen[rows]
        own = body(input_ids=ids, attention_mask=seen.long(), **keywords).last_hidden_state
        if hidden is None:
            hidden = own.new_empty(batch.num_tokens, own.shape[-1])
        hidden[rows[mask]] = own[mask]
    assert hidden is not None  # a batch holds at least one sequence
    return hidden


def _unseen(batch: ForwardBatch) -> torch.Tensor | None:
    """bool [T]: tokens that the others of their text do not see; None where there are none."""
    behind = unattended_of(batch)
    if behind is None:
        return None
    unseen = torch.zeros(batch.num_tokens, dtype=torch.bool, device=batch.input_ids.device)
    for _, first, end in behind.spans:
        unseen[first:end] = True
    return unseen


def _padded_rows(starts: list[int], group: list[int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a group: packed rows int64 [B, L], padding pointing at the text's first, and the mask bool [B, L]."""
    first = torch.tensor([starts[i] for i in group], device=device)[:, None]
    length = torch.tensor([starts[i + 1] - starts[i] for i in group], device=device)[:, None]
    offsets = torch.arange(int(length.max()), device=device)[None]
    mask = offsets < length
    return first + offsets * mask, mask
