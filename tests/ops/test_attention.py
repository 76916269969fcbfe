"""The attention kernels against the float64 twins, at the borders of windows, pages and key blocks."""

from __future__ import annotations

import pytest
import torch

from pyruntime.ops import attention, reference

TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
LENGTHS = [1, 15, 16, 17, 63, 64, 65, 130]
HEADS = [(4, 1, 256, 256), (12, 12, 32, 32), (8, 2, 64, 48), (6, 3, 80, 80), (2, 2, 128, 128), (3, 1, 7, 5)]
OPTIONS = [
    {"causal": True},
    {"causal": False},
    {"causal": True, "window_left": 0},
    {"causal": True, "window_left": 63},
    {"causal": True, "window_left": 64},
    {"causal": False, "window_left": 16, "window_right": 5},
    {"causal": True, "softcap": 5.0},
]


def starts_of(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def transposed(heads: int, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """[rows, heads, width] as models hand it over: a transposed view."""
    return torch.randn(heads, rows, width).to(dtype).transpose(0, 1)


def pages(kv_lengths: list[int], size: int, heads: int, width: int, value_width: int, dtype: torch.dtype):
    """A cache with scattered blocks, NaN wherever no sequence has a key, and its block tables."""
    counts = [-(-n // size) for n in kv_lengths]
    shuffled = torch.randperm(sum(counts) + 3).int()
    tables = torch.full((len(counts), max(counts) + 1), -1, dtype=torch.int32)
    k = torch.full((sum(counts) + 3, size, heads, width), torch.nan, dtype=dtype)
    v = torch.full((sum(counts) + 3, size, heads, value_width), torch.nan, dtype=dtype)
    used = 0
    for i, (length, count) in enumerate(zip(kv_lengths, counts, strict=True)):
        tables[i, :count] = shuffled[used : used + count]
        used += count
        for position in range(length):
            block = int(tables[i, position // size])
            k[block, position % size] = torch.randn(heads, width).to(dtype)
            v[block, position % size] = torch.randn(heads, value_width).to(dtype)
    return k, v, tables


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_packed_matches_reference(heads: tuple[int, int, int, int], options: dict) -> None:
    query_heads, key_heads, width, value_width = heads
    starts = starts_of(LENGTHS)
    rows = int(starts[-1])
    for dtype, tolerance in TOLERANCE.items():
        q, k = transposed(query_heads, rows, width, dtype), transposed(key_heads, rows, width, dtype)
        v = torch.randn(rows, key_heads, value_width).to(dtype)
        for sinks in (None, torch.randn(query_heads))[dtype is not torch.float32 :]:
            got = attention.packed_attention(q, k, v, starts, scale=width**-0.5, sinks=sinks, **options)
            want = reference.packed_attention(q, k, v, starts, scale=width**-0.5, sinks=sinks, **options)
            assert got.dtype == dtype and got.shape == (rows, query_heads, value_width)
            assert (got.double() - want).abs().max() < tolerance


@pytest.mark.parametrize("size", [1, 16, 17])
@pytest.mark.parametrize("window_left", [-1, 15, 64])
def test_paged_matches_reference(size: int, window_left: int) -> None:
    for heads in ((4, 1, 256, 256), (8, 2, 64, 48)):
        query_heads, key_heads, width, value_width = heads
        queries, keys = [1, 5, 1, 70, 16, 1], [1, 5, 33, 129, 200, 64]
        starts, kv_lengths = starts_of(queries), torch.tensor(keys).int()
        for dtype, tolerance in TOLERANCE.items():
            q = transposed(query_heads, sum(queries), width, dtype)
            k, v, tables = pages(keys, size, key_heads, width, value_width, dtype)
            arguments = (q, k, v, starts, kv_lengths, tables)
            extras = ({"softcap": 4.0, "sinks": torch.randn(query_heads)}, {}, {"causal": False})
            for extra in extras if dtype is torch.float32 else extras[:1]:
                options = {"scale": width**-0.5, "window_left": window_left, **extra}
                got = attention.paged_attention(*arguments, **options)
                want = reference.paged_attention(*arguments, **options)
                assert (got.double() - want).abs().max() < tolerance


def test_long_sequence_and_large_scores() -> None:
    starts = starts_of([2900])
    q, k, v = torch.randn(2900, 2, 64) * 20, torch.randn(2900, 1, 64) * 20, torch.randn(2900, 1, 64)
    got = attention.packed_attention(q, k, v, starts, causal=True, scale=1.0)
    want = reference.packed_attention(q, k, v, starts, causal=True, scale=1.0)
    # Scores reach 1e5, where float32 itself is 1e-2 coarse; the mean tells a wrong softmax from rounding.
    assert (got.double() - want).abs().mean() < 1e-3
    assert torch.isfinite(got).all()


def test_row_is_bit_identical_alone_in_any_batch_chunking_and_page_size() -> None:
    length, heads = 150, (4, 2, 64, 64)
    q, k, v = torch.randn(length, 4, 64), torch.randn(length, 2, 64), torch.randn(length, 2, 64)
    options = {"scale": 0.125, "window_left": 70}
    alone = attention.packed_attention(q, k, v, starts_of([length]), causal=True, **options)
    before = 37
    packed = [torch.cat([torch.randn(before, *t.shape[1:]), t, torch.randn(5, *t.shape[1:])]) for t in (q, k, v)]
    batched = attention.packed_attention(*packed, starts_of([before, length, 5]), causal=True, **options)
    assert torch.equal(batched[before : before + length], alone)
    torch.set_num_threads(1)
    assert torch.equal(attention.packed_attention(q, k, v, starts_of([length]), causal=True, **options), alone)
    for size in (1, 16, 17):
        caches = pages([length], size, heads[1], 64, 64, torch.float32)
        blocks = caches[2][0].long()
        at = torch.arange(length)
        caches[0][blocks[at // size], at % size] = k
        caches[1][blocks[at // size], at % size] = v
        for begin, end in ((0, 150), (0, 33), (33, 100), (149, 150)):
            chunk = attention.paged_attention(
                q[begin:end],
                caches[0],
                caches[1],
                starts_of([end - begin]),
                torch.tensor([end]).int(),
                caches[2],
                **options,
            )
            assert torch.equal(chunk, alone[begin:end])


@pytest.mark.parametrize("window_left", [-1, 700])
@pytest.mark.parametrize("length", [511, 512, 513, 1500])
def test_long_decode_is_shared_among_threads_with_the_same_bits(length: int, window_left: int) -> None:
    """One row of many keys is cut by their position; alone, batched, in a prompt, on one thread it answers alike."""
    q, k, v = torch.randn(length, 4, 64), torch.randn(length, 1, 64), torch.randn(length, 1, 64)
    options = {"scale": 0.3, "window_left": window_left, "sinks": torch.randn(4), "softcap": 8.0}
    prompt = attention.packed_attention(q, k, v, starts_of([length]), causal=True, **options)
    want = reference.packed_attention(q, k, v, starts_of([length]), causal=True, **options)
    assert (prompt.double() - want).abs().max() < TOLERANCE[torch.float32]
    keys, values, tables = pages([length], 16, 1, 64, 64, torch.float32)
    at = torch.arange(length)
    keys[tables[0].long()[at // 16], at % 16], values[tables[0].long()[at // 16], at % 16] = k, v
    cache = (keys, values)
    bounds, lengths = torch.arange(2).int(), torch.tensor([length]).int()
    alone = attention.paged_attention(q[-1:], *cache, bounds, lengths, tables, **options)
    assert torch.equal(alone, prompt[-1:])
    many = attention.paged_attention(
        q[-1:].expand(20, -1, -1), *cache, torch.arange(21).int(), lengths.expand(20).contiguous(),
        tables.expand(20, -1).contiguous(), **options,
    )  # fmt: skip
    torch.set_num_threads(1)
    single = attention.paged_attention(q[-1:], *cache, bounds, lengths, tables, **options)
    assert torch.equal(single, alone) and torch.equal(many, alone.expand(20, -1, -1))


@pytest.mark.parametrize("width", [32, 64, 80])
def test_bidirectional_row_is_bit_identical_alone_and_in_a_batch(width: int) -> None:
    lengths = [1, 26, 2, 67, 130, 5]
    starts = starts_of(lengths)
    q, k, v = (torch.randn(sum(lengths), 3, width).bfloat16() for _ in range(3))
    together = attention.packed_attention(q, k, v, starts, causal=False, scale=0.2)
    for i, length in enumerate(lengths):
        own = slice(int(starts[i]), int(starts[i + 1]))
        alone = attention.packed_attention(q[own], k[own], v[own], starts_of([length]), causal=False, scale=0.2)
        assert torch.equal(alone, together[own])


def test_nan_stays_in_its_sequence() -> None:
    q, k, v = torch.randn(20, 2, 32), torch.randn(20, 2, 32), torch.randn(20, 2, 32)
    k[3] = torch.nan
    out = attention.packed_attention(q, k, v, starts_of([10, 10]), causal=False, scale=0.2)
    assert out[:10].isnan().all() and out[10:].isfinite().all()


def test_empty_batch_and_window_outside_the_sequence() -> None:
    nothing = attention.packed_attention(*[torch.empty(0, 2, 8)] * 3, starts_of([]), causal=True, scale=1.0)
    assert nothing.shape == (0, 2, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"starts": torch.tensor([0, 3]).int()}, "starts: must end with"),
        ({"starts": torch.tensor([0, 6, 4]).int()}, "starts: must not fall"),
        ({"starts": torch.tensor([0, 4])}, "starts: expected dtype"),
        ({"k": torch.randn(4, 2, 9)}, "k: expected heads 8 wide"),
        ({"k": torch.randn(4, 3, 8), "v": torch.randn(4, 3, 8)}, "not a multiple"),
        ({"k": torch.randn(4, 2, 8).bfloat16()}, "k: expected the dtype of q"),
        ({"v": torch.randn(3, 2, 8)}, "expected 4 rows"),
        ({"q": torch.randn(4, 8)}, "q: expected shape"),
        ({"q": torch.randn(4, 8, 4).transpose(1, 2)}, "last dimension must be contiguous"),
        ({"q": torch.randint(3, (4, 4, 8))}, "q: expected float32"),
        ({"sinks": torch.randn(3)}, "sinks: expected shape"),
        ({"window_left": -2}, "window_left"),
        ({"softcap": -1.0}, "softcap"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value,
)
def test_bad_input_raises(change: dict, message: str) -> None:
    good = {"q": torch.randn(4, 4, 8), "k": torch.randn(4, 2, 8), "v": torch.randn(4, 2, 8)}
    arguments = {**good, "starts": starts_of([4]), "causal": True, "scale": 1.0, **change}
    with pytest.raises(RuntimeError, match=message):
        attention.packed_attention(**arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_tables": torch.tensor([[0, 9]]).int()}, "block_tables: entry"),
        ({"block_tables": torch.tensor([[0, -1]]).int()}, "block_tables: entry"),
        ({"block_tables": torch.tensor([[0]]).int()}, "needs 2 blocks"),
        ({"kv_lengths": torch.tensor([1]).int()}, "kv_lengths: sequence 0"),
        ({"v_cache": torch.randn(4, 3, 2, 8)}, "v_cache: expected the blocks"),
    ],
)
def test_bad_pages_raise(change: dict, message: str) -> None:
    arguments = {
        "q": torch.randn(2, 4, 8),
        "k_cache": torch.randn(4, 4, 2, 8),
        "v_cache": torch.randn(4, 4, 2, 8),
        "query_starts": starts_of([2]),
        "kv_lengths": torch.tensor([6]).int(),
        "block_tables": torch.tensor([[0, 1]]).int(),
        "scale": 1.0,
    }
    with pytest.raises(RuntimeError, match=message):
        attention.paged_attention(**{**arguments, **change})
