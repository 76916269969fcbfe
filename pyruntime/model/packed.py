"""The packed forward: one transformers call over the rows of all sequences, attention by our kernels."""

from __future__ import annotations

from typing import Any

import torch

from pyruntime.model.attention import AttentionContext, attending
from pyruntime.types import ForwardBatch


@torch.inference_mode()
def run_packed(
    body: Any, batch: ForwardBatch, context: AttentionContext, offset: int, token_types: torch.Tensor | None
) -> torch.Tensor:
    """ids [T] → last hidden rows [T, H].

    ``offset``: the position of a text's first token in the model's table. ``token_types``: int64 [T].
    """
    keywords = {} if token_types is None else {"token_type_ids": token_types.unsqueeze(0)}
    positions = _positions(batch, offset) if offset else batch.positions
    with attending(context):
        output = body(
            input_ids=batch.input_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False, **keywords
        )
    rows: torch.Tensor = output.last_hidden_state[0]
    return rows


def _positions(batch: ForwardBatch, offset: int) -> torch.Tensor:
    """Positions as RoBERTa's family counts them: from padding_idx + 1, and tokens equal to padding_idx not at all."""
    if batch.kv_lengths is not None:  # a decoder's chunk does not know what stood before it
        return batch.positions + offset
    padding = offset - 1
    counts = batch.input_ids.ne(padding).long()
    running = counts.cumsum(0)
    starts = batch.query_starts.long()
    before = running[starts[:-1]] - counts[starts[:-1]]
    own = running - before.repeat_interleave(starts.diff(), output_size=batch.num_tokens)
    return own * counts + padding
