"""The shared forward: whatever the sequences of a batch are for, their hidden rows come from here."""

from __future__ import annotations

import torch

from pyruntime.model.attention import AttentionContext
from pyruntime.model.graphs import CapturedSteps
from pyruntime.model.kv_cache import KVCache
from pyruntime.model.loader import LoadedModel
from pyruntime.model.packed import run_packed
from pyruntime.model.padded import run_padded
from pyruntime.model.unattended import unattended_of
from pyruntime.types import ExecutionPath, ForwardBatch


class ModelRunner:
    """Runs one loaded model. ``cache`` is None for encoders, whose sequences attend to themselves alone.

    ``captured``: what runs the batches that have a shape.
    """

    def __init__(self, loaded: LoadedModel, cache: KVCache | None) -> None:
        self.loaded = loaded
        self.cache = cache
        self.captured: CapturedSteps | None = None

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Hidden rows [T, H] in the model's dtype, one a token of the packed batch.

        Those of a captured step are overwritten by the next one.
        """
        if self.cache is not None and batch.block_copies is not None:
            self.cache.copy_blocks(batch.block_copies)
        if self.captured is not None and batch.shape is not None:
            return self.captured.forward(batch)
        return self.compute(batch)

    def compute(self, batch: ForwardBatch) -> torch.Tensor:
        """``forward`` without what goes before it, kernel by kernel."""
        loaded = self.loaded
        types = batch.token_type_ids if loaded.takes_token_types else None
        if loaded.execution_path is ExecutionPath.PADDED:
            return run_padded(loaded.body, batch, types, loaded.config.pad_token_id, loaded.one_by_one)
        unattended = unattended_of(batch) if self.cache is None else None
        context = AttentionContext(batch, self.cache, causal=loaded.is_causal, unattended=unattended)
        return run_packed(loaded.body, batch, context, loaded.position_offset, types)
