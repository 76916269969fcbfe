"""Which steps are captured, and what padding puts behind them."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest

from pyruntime.scheduler.batch_builder import BatchBuilder
from pyruntime.scheduler.plan import StepPlan
from pyruntime.scheduler.sequence import Sequence
from pyruntime.scheduler.step_shapes import MOST_ROWS, StepShapes, row_counts
from pyruntime.types import StepShape, Task

BLOCK, NUM_BLOCKS = 16, 1000
SHAPES = StepShapes(64, 8192, NUM_BLOCKS, BLOCK)


def decoding(length: int, first_block: int = 0) -> Sequence:
    """A sequence that lacks its last token's keys and values."""
    sequence = Sequence(Task.GENERATE, [7] * (length - 1))
    sequence.token_ids.append(9)
    sequence.num_computed = length - 1
    sequence.blocks = list(range(first_block, first_block + -(-length // BLOCK)))
    return sequence


def plan_of(*lengths: int) -> StepPlan:
    plan = StepPlan()
    for length in lengths:
        plan.add(decoding(length), 1)
    return plan


@pytest.mark.parametrize("most", [1, 2, 3, 31, 32, 33, 100, 256])
def test_row_counts_end_at_the_most_and_waste_little(most: int) -> None:
    counts = row_counts(most)
    assert counts[0] == 1 and counts[-1] == most and counts == sorted(set(counts))
    for before, count in pairwise(counts):
        assert count - before - 1 <= count * (0.5 if count < 48 else 1 / 3)
    assert row_counts(256) == [1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256]


@pytest.mark.parametrize(
    ("most_tokens", "num_blocks", "widths"),
    [
        (10**6, 10**6, {64, 256, 1024, 4096}),
        (2048, 10**6, {64, 128}),
        (1024, 10**6, {64}),
        (10**6, 70, {64, 70}),
        (100, 3, {3}),
    ],
)
def test_tables_are_no_wider_than_they_can_be(most_tokens: int, num_blocks: int, widths: set[int]) -> None:
    shapes = StepShapes(1000, most_tokens, num_blocks, BLOCK).all()
    assert {shape.blocks for shape in shapes} == widths
    assert {shape.rows for shape in shapes} == set(row_counts(MOST_ROWS))
    assert shapes == sorted(shapes, reverse=True) and len(shapes) == len(set(shapes))


def test_a_step_takes_the_least_shape_that_holds_it() -> None:
    assert SHAPES.of(plan_of(5)) == (1, 64)
    assert SHAPES.of(plan_of(5, 1024, 9)) == (4, 64)
    assert SHAPES.of(plan_of(1025)) == (1, 256)
    assert SHAPES.of(plan_of(*[3] * 33)) == (48, 64)
    assert SHAPES.of(plan_of(*[3] * 64)) == (64, 64)
    drafted = plan_of(5, 6)
    drafted.draft(drafted.entries[1][0], [1, 2, 3])
    assert SHAPES.of(drafted) == (8, 64)


def test_other_steps_have_none() -> None:
    assert SHAPES.of(plan_of(*[3] * 65)) is None
    assert SHAPES.of(plan_of(9000)) is None
    prompt = plan_of(5, 6)
    prompt.add(Sequence(Task.GENERATE, [1, 2]), 2)
    assert SHAPES.of(prompt) is None
    scored = StepPlan()
    scored.add(Sequence(Task.SCORE, [1]), 1)
    assert SHAPES.of(scored) is None


@pytest.mark.parametrize("uses_token_types", [False, True])
def test_padding_stands_behind_what_is_there(uses_token_types: bool) -> None:
    generator = random.Random(5)
    builder = BatchBuilder(BLOCK, "cpu", uses_token_types, SHAPES)
    plain = BatchBuilder(BLOCK, "cpu", uses_token_types)
    for _ in range(50):
        plan = plan_of(*(generator.randrange(2, 2000) for _ in range(generator.randrange(1, 20))))
        for sequence, _ in plan.entries:
            if generator.random() < 0.3:
                plan.draft(sequence, [3] * min(generator.randrange(1, 5), BLOCK - (len(sequence) - 1) % BLOCK - 1))
        own, batch = plain.build(plan), builder.build(plan)
        assert batch.shape == SHAPES.of(plan) and own.shape is None and batch.rows == own.rows
        num_rows, num_sequences = own.num_tokens, len(plan.entries)
        for name in ("input_ids", "positions", "slot_mapping", "kv_lengths", "query_starts", "token_type_ids"):
            wanted, padded = getattr(own, name), getattr(batch, name)
            assert (wanted is None) == (padded is None)
            if wanted is not None:
                assert padded.dtype is wanted.dtype and padded[: len(wanted)].equal(wanted), name
                assert len(padded) == batch.shape.rows + (name == "query_starts")
        tables = batch.block_tables
        assert tables.shape == batch.shape and tables.dtype is own.block_tables.dtype
        assert tables[:num_sequences, : own.block_tables.shape[1]].equal(own.block_tables)
        # What is behind lies in the block that no sequence has, and each row of it in a sequence of its own.
        assert set(batch.slot_mapping[num_rows:].tolist()) <= {NUM_BLOCKS * BLOCK}
        assert set(tables[num_sequences:, 0].tolist()) <= {NUM_BLOCKS}
        assert set(batch.kv_lengths[num_sequences:].tolist()) <= {1}
        each = np.diff(batch.query_starts.numpy())[num_sequences:]
        assert each.tolist() == [1] * (batch.shape.rows - num_rows) + [0] * (num_rows - num_sequences)


def test_a_batch_of_padding_alone() -> None:
    batch = BatchBuilder(BLOCK, shapes=SHAPES).padding(StepShape(4, 64))
    assert batch.shape == (4, 64) and batch.rows == [] and batch.block_copies is None
    assert batch.query_starts.tolist() == [0, 1, 2, 3, 4] and batch.block_tables[:, 0].tolist() == [NUM_BLOCKS] * 4


@pytest.mark.parametrize("most_tokens", [50, 1000, 8192])
@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_a_rehearsal_stays_in_the_block_of_padding(most_tokens: int, block_size: int) -> None:
    shapes = StepShapes(64, most_tokens, NUM_BLOCKS, block_size)
    builder = BatchBuilder(block_size, shapes=shapes)
    for shape in shapes.all():
        batch, padding = builder.rehearsed(shape), builder.padding(shape)
        for name in ("input_ids", "positions", "query_starts", "kv_lengths", "block_tables", "slot_mapping"):
            ours, other = getattr(batch, name), getattr(padding, name)
            assert ours.shape == other.shape and ours.dtype is other.dtype, name
        assert set(batch.block_tables.flatten().tolist()) == {NUM_BLOCKS}
        assert set((batch.slot_mapping // block_size).tolist()) == {NUM_BLOCKS}
        assert batch.kv_lengths.equal(batch.positions.int() + 1) and batch.query_starts.equal(padding.query_starts)
        assert int(batch.kv_lengths.max()) == min(shape.blocks * block_size, most_tokens)
        written = list(
            zip(batch.slot_mapping.tolist(), batch.input_ids.tolist(), batch.positions.tolist(), strict=True)
        )
        assert len(set(written)) == len({slot for slot, _, _ in written})


def test_without_shapes_nothing_is_padded() -> None:
    assert BatchBuilder(BLOCK).build(plan_of(5)).shape is None
