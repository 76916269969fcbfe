"""StepPlan → ForwardBatch."""

from __future__ import annotations

from itertools import accumulate

import numpy as np

from pyruntime.placing import place
from pyruntime.scheduler.plan import StepPlan
from pyruntime.scheduler.sequence import Sequence
from pyruntime.scheduler.step_shapes import StepShapes
from pyruntime.types import ForwardBatch, SequenceRows, StepShape


class BatchBuilder:
    """Packs the planned tokens of all sequences into one ``ForwardBatch`` on ``device``.

    ``block_size`` 0: the model has no key/value cache. Steps that ``shapes`` has a shape for are padded to it.
    """

    def __init__(
        self, block_size: int, device: str = "cpu", uses_token_types: bool = False, shapes: StepShapes | None = None
    ) -> None:
        self.block_size = block_size
        self.device = device
        self.uses_token_types = uses_token_types
        self.shapes = shapes

    def build(self, plan: StepPlan) -> ForwardBatch:
        return self._packed(plan, self.shapes.of(plan) if self.shapes is not None else None)

    def padding(self, shape: StepShape) -> ForwardBatch:
        """A batch of that shape with nothing in it."""
        return self._packed(StepPlan(), shape)

    def rehearsed(self, shape: StepShape) -> ForwardBatch:
        """A batch of that shape as ``StepShapes.rehearsed`` makes it up."""
        assert self.shapes is not None
        fields = self.shapes.rehearsed(shape)
        if self.uses_token_types:
            fields["token_type_ids"] = np.zeros(shape.rows, np.int64)
        return ForwardBatch([], **place(fields, self.device), shape=shape)

    def _packed(self, plan: StepPlan, shape: StepShape | None) -> ForwardBatch:
        drafts = plan.drafts
        spans = [(s, s.num_computed, s.num_computed + n + len(drafts.get(s, ()))) for s, n in plan.entries]
        starts = [0, *accumulate(end - begin for _, begin, end in spans)]
        rows = [
            SequenceRows(s, s.task, start, end - begin, end >= len(s) and not s.is_prefix, drafts.get(s, ()))
            for start, (s, begin, end) in zip(starts, spans, strict=False)
        ]
        # Drafts lie behind the last known token, where the slice ends.
        tokens = [t for s, begin, end in spans for t in (*s.token_ids[begin:end], *drafts.get(s, ()))]
        fields: dict[str, np.ndarray] = {
            "input_ids": np.array(tokens, np.int64),
            "positions": np.array([p for _, begin, end in spans for p in range(begin, end)], np.int64),
            "query_starts": np.array(starts, np.int32),
        }
        if self.uses_token_types:
            fields["token_type_ids"] = np.array([t for span in spans for t in _token_types(*span)], np.int64)
        if self.block_size:
            fields |= self._cache_fields(spans, plan)
        if shape is not None and self.shapes is not None:
            fields = self.shapes.padded(fields, shape)
        return ForwardBatch(rows, **place(fields, self.device), shape=shape)

    def _cache_fields(self, spans: list[tuple[Sequence, int, int]], plan: StepPlan) -> dict[str, np.ndarray]:
        size = self.block_size
        width = max((len(s.blocks) for s, _, _ in spans), default=0)
        tables = [s.blocks + [-1] * (width - len(s.blocks)) for s, _, _ in spans]
        slots = [s.blocks[p // size] * size + p % size for s, begin, end in spans for p in range(begin, end)]
        fields: dict[str, np.ndarray] = {
            "kv_lengths": np.array([end for _, _, end in spans], np.int32),
            "block_tables": np.array(tables, np.int32).reshape(len(spans), width),
            "slot_mapping": np.array(slots, np.int64),
        }
        if plan.block_copies:
            fields["block_copies"] = np.array(plan.block_copies, np.int64)
        return fields


def _token_types(sequence: Sequence, begin: int, end: int) -> list[int]:
    if sequence.token_type_ids is None:
        return [0] * (end - begin)
    return sequence.token_type_ids[begin:end]
