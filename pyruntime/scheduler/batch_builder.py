"""StepPlan → ForwardBatch: the only file of the scheduler that makes tensors."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import torch

from pyruntime.scheduler.plan import StepPlan
from pyruntime.scheduler.sequence import Sequence
from pyruntime.types import ForwardBatch, SequenceRows


class BatchBuilder:
    """Packs the planned tokens of all sequences into one ``ForwardBatch`` on ``device``.

    ``block_size`` 0: the model has no key/value cache.
    """

    def __init__(self, block_size: int, device: str = "cpu", uses_token_types: bool = False) -> None:
        self.block_size = block_size
        self.device = device
        self.uses_token_types = uses_token_types

    def build(self, plan: StepPlan) -> ForwardBatch:
        drafts = plan.drafts
        spans = [(s, s.num_computed, s.num_computed + n + len(drafts.get(s, ()))) for s, n in plan.entries]
        starts = [0, *accumulate(end - begin for _, begin, end in spans)]
        batch = ForwardBatch(
            rows=[
                SequenceRows(s, s.task, start, end - begin, end >= len(s) and not s.is_prefix, drafts.get(s, ()))
                for start, (s, begin, end) in zip(starts, spans, strict=False)
            ],
            # Drafts lie behind the last known token, where the slice ends.
            input_ids=self._tensor(
                [t for s, begin, end in spans for t in (*s.token_ids[begin:end], *drafts.get(s, ()))]
            ),
            positions=self._tensor([p for _, begin, end in spans for p in range(begin, end)]),
            query_starts=self._tensor(starts, np.int32),
        )
        if self.uses_token_types:
            batch.token_type_ids = self._tensor([t for span in spans for t in _token_types(*span)])
        if self.block_size:
            self._add_cache_fields(batch, spans, plan)
        return batch

    def _add_cache_fields(self, batch: ForwardBatch, spans: list[tuple[Sequence, int, int]], plan: StepPlan) -> None:
        size = self.block_size
        width = max(len(s.blocks) for s, _, _ in spans)
        batch.kv_lengths = self._tensor([end for _, _, end in spans], np.int32)
        batch.block_tables = self._tensor([s.blocks + [-1] * (width - len(s.blocks)) for s, _, _ in spans], np.int32)
        batch.slot_mapping = self._tensor(
            [s.blocks[p // size] * size + p % size for s, begin, end in spans for p in range(begin, end)]
        )
        if plan.block_copies:
            batch.block_copies = self._tensor(plan.block_copies)

    def _tensor(self, values: list, dtype: type[np.integer] = np.int64) -> torch.Tensor:
        # By way of numpy, which reads a list three times as fast.
        return torch.from_numpy(np.array(values, dtype=dtype)).to(self.device)


def _token_types(sequence: Sequence, begin: int, end: int) -> list[int]:
    if sequence.token_type_ids is None:
        return [0] * (end - begin)
    return sequence.token_type_ids[begin:end]
