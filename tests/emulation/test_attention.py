"""The CUDA attention kernels against their float64 twins, at the borders of windows, pages, key blocks and splits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pyruntime.ops import reference
from pyruntime.scheduler.step_shapes import StepShapes
from pyruntime.types import StepShape
from tests.emulation import attention_calls as calls
from tests.emulation.harness import RANDOM, REVERSE, Emulation
from tests.ops.test_attention import HEADS, OPTIONS, pages, starts_of, transposed

TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
LENGTHS = [15, 1, 16, 17, 0, 65]
SINKS = {"causal": True, "sinks": torch.tensor([0.5, -2.0, 3.0, 1.0])}


def packed(lengths: list[int], heads: tuple[int, int, int, int], dtype: torch.dtype) -> list[torch.Tensor]:
    rows, (q_heads, kv_heads, width, value_width) = sum(lengths), heads
    shapes = ((q_heads, width), (kv_heads, width), (kv_heads, value_width))
    return [*(transposed(count, rows, size, dtype) for count, size in shapes), starts_of(lengths)]


def paged(
    queries: list[int], keys: list[int], size: int, heads: tuple[int, int, int, int], dtype: torch.dtype
) -> list[torch.Tensor]:
    q_heads, kv_heads, width, value_width = heads
    k, v, tables = pages(keys, size, kv_heads, width, value_width, dtype)
    lengths = torch.tensor(keys, dtype=torch.int32)
    return [transposed(q_heads, sum(queries), width, dtype), k, v, starts_of(queries), lengths, tables]


def assert_near(got: torch.Tensor, want: torch.Tensor) -> None:
    assert (got.double() - want).abs().max() < TOLERANCE[got.dtype]


@pytest.mark.parametrize(
    ("heads", "dtype"),
    [(heads, torch.float32) for heads in (*HEADS, (1, 1, 300, 9), (2, 1, 96, 96))]
    + [(heads, dtype) for heads in HEADS[2:4] for dtype in (torch.bfloat16, torch.float16)],
    ids=str,
)
def test_packed(emulation: Emulation, heads: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    arguments = packed(LENGTHS, heads, dtype)
    options: dict[str, Any] = {"causal": True, "scale": heads[2] ** -0.5}
    low = calls.packed_attention(emulation, *arguments, rows_each=1, **options)
    assert_near(low, reference.packed_attention(*arguments, **options))
    assert torch.equal(calls.packed_attention(emulation, *arguments, rows_each=4, **options), low)


@pytest.mark.parametrize("options", [*OPTIONS, SINKS], ids=str)
def test_options(emulation: Emulation, options: dict[str, Any]) -> None:
    arguments = packed([1, 64, 130], (4, 2, 40, 40), torch.float32)
    got = calls.packed_attention(emulation, *arguments, scale=0.2, **options)
    assert_near(got, reference.packed_attention(*arguments, scale=0.2, **options))


@pytest.mark.parametrize("options", [{}, {"window_left": 30}, {"window_left": 600}, {"causal": False}, SINKS], ids=str)
@pytest.mark.parametrize("size", [1, 16, 17])
def test_paged_whatever_the_split(emulation: Emulation, size: int, options: dict[str, Any]) -> None:
    arguments = paged([1, 3, 1, 20], [1, 517, 1024, 20], size, (4, 2, 16, 24), torch.float32)
    whole = calls.paged_attention(emulation, *arguments, scale=0.3, **options)
    assert_near(whole, reference.paged_attention(*arguments, scale=0.3, **options))
    for rows_each in (1, 4):
        split = calls.paged_attention(emulation, *arguments, scale=0.3, rows_each=rows_each, split=True, **options)
        assert torch.equal(split, whole)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("queries", [[1, 1, 1], [1, 4, 2]], ids=str)
def test_padding_of_a_captured_step_changes_no_row(emulation: Emulation, queries: list[int], split: bool) -> None:
    """Wider tables, rows of padding, and sequences without rows behind them (``scheduler/step_shapes.py``)."""
    q, k, v, starts, lengths, tables = paged(queries, [600, 40, 17], 16, (4, 2, 16, 24), torch.float32)
    caches, rows, size = (k, v), len(q), 12
    want = calls.paged_attention(emulation, q, *caches, starts, lengths, tables, scale=0.3)
    spare = len(k)
    own = {"query_starts": starts, "kv_lengths": lengths, "block_tables": tables}
    fields = {name: tensor.numpy() for name, tensor in own.items()}
    fields |= dict.fromkeys(("input_ids", "positions", "slot_mapping"), np.zeros(rows, np.int64))
    wide = StepShapes(size, 2000, spare, 16).padded(fields, StepShape(size, 125))
    padded = [torch.from_numpy(wide[name]) for name in own]
    caches = tuple(torch.cat([cache, torch.zeros_like(cache[:1])]) for cache in caches)
    got = calls.paged_attention(
        emulation, torch.cat([q, q[: size - rows]]), *caches, *padded, scale=0.3, rows_each=1, split=split
    )
    assert torch.equal(got[:rows], want) and got[rows:].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_is_the_same_in_any_batch_chunk_and_page(emulation: Emulation, dtype: torch.dtype) -> None:
    heads, length = (4, 2, 24, 24), 75
    q, k, v, starts = packed([length], heads, dtype)
    whole = calls.packed_attention(emulation, q, k, v, starts, causal=True, scale=0.3, window_left=40)
    beside = packed([9, length, 30], heads, dtype)
    for tensor, own in zip(beside[:3], (q, k, v), strict=True):
        tensor[9 : 9 + length] = own
    in_batch = calls.packed_attention(emulation, *beside, causal=True, scale=0.3, window_left=40)
    assert torch.equal(in_batch[9 : 9 + length], whole)
    for size, chunk in ((16, 75), (5, 31), (64, 1)):
        table = torch.arange(-(-length // size)).int()[None]
        caches = [torch.full((table.shape[1], size, 2, 24), torch.nan, dtype=dtype) for _ in range(2)]
        calls.store_kv(emulation, k, v, torch.arange(length), *caches)
        for end in range(length, 0, -chunk):
            begin = max(0, end - chunk)
            got = calls.paged_attention(
                emulation, q[begin:end], *caches, starts_of([end - begin]), torch.tensor([end]).int(), table,
                scale=0.3, window_left=40,
            )  # fmt: skip
            assert torch.equal(got, whole[begin:end])


def test_order_of_threads_and_blocks_does_not_matter(emulation: Emulation) -> None:
    arguments = paged([2, 1], [600, 9], 16, (4, 2, 16, 24), torch.float32)
    want = calls.paged_attention(emulation, *arguments, scale=0.3)
    for order, seed in ((REVERSE, 0), (RANDOM, 1)):
        emulation.order, emulation.seed = order, seed
        for split in (False, True):
            assert torch.equal(calls.paged_attention(emulation, *arguments, scale=0.3, split=split), want)


@pytest.mark.parametrize("rows_each", [1, 4])
@pytest.mark.parametrize("first", [20, 63, 64, 65, 127])
def test_what_is_not_visible_may_be_anything(emulation: Emulation, first: int, rows_each: int) -> None:
    """Keys from ``first`` on for the rows before it; keys before it for the rows whose window begins there. A row may
    see all of a block of keys but one at an end."""
    q, k, v, starts = packed([140], (2, 1, 16, 16), torch.float32)
    options: dict[str, Any] = {"causal": True, "scale": 0.3, "window_left": 62, "rows_each": rows_each}
    want = calls.packed_attention(emulation, q, k, v, starts, **options)
    assert want.isfinite().all()
    for hidden, seeing in ((slice(first, None), slice(first)), (slice(first), slice(first + 62, None))):
        keys, values = k.clone(), v.clone()
        keys[hidden], values[hidden] = torch.nan, torch.inf
        got = calls.packed_attention(emulation, q, keys, values, starts, **options)
        others = torch.ones(140, dtype=torch.bool)
        others[seeing] = False
        assert torch.equal(got[seeing], want[seeing]) and got[others].isnan().all()


def test_scores_that_are_not_finite(emulation: Emulation) -> None:
    q, k, v, starts = packed([6], (1, 1, 4, 4), torch.float32)
    q[:] = 1.0
    k[:3] = -torch.inf  # of these a row sees nothing, and answers zero
    got = calls.packed_attention(emulation, q, k, v, starts, causal=True, scale=1.0)
    assert (got[:3] == 0).all()
    assert_near(got[3:], reference.packed_attention(q, k, v, starts, causal=True, scale=1.0)[3:])


@pytest.mark.parametrize("split", [False, True])
def test_wrong_values_answer_nan_alone(emulation: Emulation, split: bool) -> None:
    q, k, v, starts, lengths, tables = paged([2] * 5, [40] * 5, 16, (2, 1, 8, 8), torch.float32)
    tables = tables[:, :3].contiguous()
    # A key more than its pages hold would be looked for in the next sequence's first.
    lengths[0], lengths[1], tables[2, 1], tables[3, 0] = 1, 3 * 16 + 1, 99, -1
    caches = k.nan_to_num(), v.nan_to_num()
    got = calls.paged_attention(emulation, q, *caches, starts, lengths, tables, scale=0.3, split=split)
    assert got.isnan().flatten(1).all(1).tolist() == [True] * 8 + [False] * 2


@pytest.mark.parametrize(("width", "value_width"), [(8, 6), (8, 8), (3, 5)])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_cache(emulation: Emulation, width: int, value_width: int, dtype: torch.dtype) -> None:
    rooms = [torch.zeros(7, 17, 2, each, dtype=dtype) for each in (width, value_width)]
    caches = rooms[0][1:6], rooms[1][1:6]  # a block before and a block behind are not theirs
    slots = torch.randperm(5 * 17)[:40]
    k, v = transposed(2, 40, width, dtype), torch.randn(40, 2, value_width).to(dtype)
    outside = torch.arange(40).view(-1, 1).eq(torch.tensor([7, 8]))
    calls.store_kv(emulation, k, v, slots.masked_fill(outside[:, 0], 5 * 17).masked_fill(outside[:, 1], -1), *caches)
    for own, rows in zip(caches, (k, v), strict=True):
        want = torch.zeros_like(own)
        kept = ~outside.any(1)
        want.view(-1, *own.shape[2:])[slots[kept]] = rows[kept]
        assert torch.equal(own, want)
    before = [own.clone() for own in caches]
    pairs = torch.tensor([[0, 2], [2, 3], [5, 1], [-1, 1], [1, -1], [1, 5], [1, 1]])
    calls.copy_blocks(emulation, *caches, pairs)
    for own, old in zip(caches, before, strict=True):
        assert torch.equal(own, old[[0, 1, 0, 0, 4]])
    assert all((room[[0, 6]] == 0).all() for room in rooms)
