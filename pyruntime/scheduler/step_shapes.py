"""Which steps run as captured graphs, and how they are padded to the shapes that were captured.

A graph runs the same kernels over the same memory each time, so a step must have one of few shapes. Steps in which
every sequence decodes, with drafts or without, are padded to one; all others, and those larger than the largest shape,
run as they are: they have rows enough for their kernels to take longer than their launches.

A padded step has as many sequences as rows. The rows of padding are sequences of their own behind the others, each of
one token in a block that no sequence has; behind them come sequences without rows.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from pyruntime.scheduler.plan import StepPlan
from pyruntime.types import StepShape

# Past this many rows a step is long enough to be launched kernel by kernel.
MOST_ROWS = 256
# Tokens that block tables are wide enough for. Attention goes by a table's width when it shares long sequences out
# among thread blocks, and all of a table goes to the device.
TABLE_TOKENS = (1024, 4096, 16384, 65536)


class StepShapes:
    """All shapes of a model, and the least one that holds a step.

    ``most_rows``: more than its steps have when all decode. ``most_tokens``: of one sequence. ``num_blocks``: of its
    cache, behind which there is one more for padding (``KVCache``), of ``block_size`` tokens as the others.
    """

    def __init__(self, most_rows: int, most_tokens: int, num_blocks: int, block_size: int) -> None:
        self._rows = row_counts(min(most_rows, MOST_ROWS))
        self._most_tokens = most_tokens
        most_blocks = min(num_blocks, -(-most_tokens // block_size))
        widths = [-(-tokens // block_size) for tokens in TABLE_TOKENS]
        self._widths = sorted({min(width, most_blocks) for width in widths})
        self._spare = num_blocks
        self._block_size = block_size

    def all(self) -> list[StepShape]:
        """Largest first: graphs that share their memory take the least when each finds what it needs there."""
        return sorted((StepShape(rows, width) for rows in self._rows for width in self._widths), reverse=True)

    def of(self, plan: StepPlan) -> StepShape | None:
        """What a step is padded to; None where it runs as it is."""
        if plan.num_tokens > self._rows[-1] or not all(sequence.is_decoding for sequence, _ in plan.entries):
            return None
        num_blocks = max(len(sequence.blocks) for sequence, _ in plan.entries)
        if num_blocks > self._widths[-1]:
            return None
        return StepShape(_least(self._rows, plan.num_tokens), _least(self._widths, num_blocks))

    def padded(self, fields: dict[str, np.ndarray], shape: StepShape) -> dict[str, np.ndarray]:
        """The arrays of a ``ForwardBatch`` with padding behind what they hold."""
        tables, starts = fields["block_tables"], fields["query_starts"]
        num_sequences, num_rows = len(tables), int(starts[-1])
        wide = np.full(shape[:2], -1, np.int32)
        wide[:num_sequences, : tables.shape[1]] = tables
        wide[num_sequences:, 0] = self._spare
        ends = np.minimum(np.arange(1, shape.rows - num_sequences + 1) + num_rows, shape.rows)
        found = dict(fields)
        for name, value in (("input_ids", 0), ("positions", 0), ("slot_mapping", self._spare * self._block_size)):
            found[name] = _filled(fields[name], value, shape.rows)
        if "token_type_ids" in fields:
            found["token_type_ids"] = _filled(fields["token_type_ids"], 0, shape.rows)
        found["query_starts"] = np.concatenate([starts, ends.astype(np.int32)])
        found["kv_lengths"] = _filled(fields["kv_lengths"], 1, shape.rows)
        found["block_tables"] = wide
        return found

    def rehearsed(self, shape: StepShape) -> dict[str, np.ndarray]:
        """The arrays of a batch without padding that is all made up, and reads and writes no block but that of padding.

        The first row is as long as tables and model allow, the next half as long, and so on, so that attention takes no
        more than a moment. Rows that write to the same place write the same.
        """
        offsets = np.arange(shape.rows) % self._block_size
        longest = min(shape.blocks * self._block_size, self._most_tokens)
        positions = (longest - 1) >> np.minimum(offsets, 31)
        return {
            "input_ids": 3 + offsets % 64,  # the first ones are often special
            "positions": positions,
            "query_starts": np.arange(shape.rows + 1, dtype=np.int32),
            "kv_lengths": (positions + 1).astype(np.int32),
            "block_tables": np.full(shape, self._spare, np.int32),
            "slot_mapping": self._spare * self._block_size + offsets,
        }


def row_counts(most: int) -> list[int]:
    """Doubled from 1 on, from 32 on with one between two, so that at most a third of a large step is padding."""
    doubled = [1 << power for power in range(most.bit_length())]
    between = [count * 3 // 2 for count in doubled if count >= 32]
    return sorted({count for count in (*doubled, *between) if count < most} | {most})


def _least(sizes: list[int], needed: int) -> int:
    return sizes[bisect_left(sizes, needed)]


def _filled(array: np.ndarray, value: int, length: int) -> np.ndarray:
    filled = np.full(length, value, array.dtype)
    filled[: len(array)] = array
    return filled
