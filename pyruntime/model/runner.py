"""The shared forward: whatever the sequences of a batch are for, their hidden rows come from here."""

from __future__ import annotations

import torch

from pyruntime.model.attention import AttentionContext
from pyruntime.model.kv_cache import KVCache
from pyruntime.model.loader import LoadedModel, run_body
from pyruntime.types import ForwardBatch


class ModelRunner:
    """Runs one loaded model. ``cache`` is None for encoders, whose sequences attend to themselves alone."""

    def __init__(self, loaded: LoadedModel, cache: KVCache | None) -> None:
        self.loaded = loaded
        self.cache = cache

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Hidden rows [T, H] in the model's dtype, one a token of the packed batch."""
        if self.cache is not None and batch.block_copies is not None:
            self.cache.copy_blocks(batch.block_copies)
        types = batch.token_type_ids if self.loaded.takes_token_types else None
        context = AttentionContext(batch, self.cache)
        return run_body(self.loaded.body, batch, context, self.loaded.position_offset, types)
