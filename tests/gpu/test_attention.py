"""Attention and the cache on the device, against their float64 twins, at the sizes that serving meets."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pyruntime.ops import attention, cache, reference
from tests.emulation.test_attention import SINKS, packed, paged
from tests.gpu.test_kernels import DTYPES, on_device
from tests.ops.test_attention import HEADS, OPTIONS, starts_of

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def on_gpu(options: dict[str, Any]) -> dict[str, Any]:
    return {name: on_device(value)[0] for name, value in options.items()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [*HEADS, (8, 2, 96, 96), (4, 4, 512, 512)], ids=str)
def test_packed(heads: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    arguments = packed([1, 15, 16, 17, 63, 0, 64, 65, 130, 700], heads, dtype)
    for options in OPTIONS:
        got = attention.packed_attention(*on_device(*arguments), scale=heads[2] ** -0.5, **options).cpu()
        want = reference.packed_attention(*arguments, scale=heads[2] ** -0.5, **options)
        assert (got.double() - want).abs().max() < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"window_left": 1023}, {"causal": False}, SINKS], ids=str)
@pytest.mark.parametrize("size", [1, 16, 17])
def test_paged(size: int, options: dict[str, Any], dtype: torch.dtype) -> None:
    arguments = paged([1, 3, 1, 300], [1, 517, 5000, 300], size, (4, 2, 128, 96), dtype)
    got = attention.paged_attention(*on_device(*arguments), scale=0.1, **on_gpu(options)).cpu()
    want = reference.paged_attention(*arguments, scale=0.1, **options)
    assert (got.double() - want).abs().max() < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_in_any_batch(dtype: torch.dtype) -> None:
    """Alone, with its splits shared among thread blocks, and among so many others that they are not."""
    count, keys = 400, 3000
    q, k, v, starts, lengths, tables = on_device(
        *paged([1] * count, [keys] + [40] * (count - 1), 16, (8, 4, 64, 64), dtype)
    )
    together = attention.paged_attention(q, k, v, starts, lengths, tables, scale=0.2)
    for row in (0, 7):
        own = [
            q[row : row + 1],
            k,
            v,
            starts[:2].clone(),
            lengths[row : row + 1].clone(),
            tables[row : row + 1].clone(),
        ]
        assert torch.equal(attention.paged_attention(*own, scale=0.2)[0], together[row])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [5, 64])
def test_cache(width: int, dtype: torch.dtype) -> None:
    slots = torch.randperm(100 * 16)[:700]
    k, v = torch.randn(4, 700, width).to(dtype).transpose(0, 1), torch.randn(700, 4, width).to(dtype)
    host = [torch.zeros(100, 16, 4, width, dtype=dtype) for _ in range(2)]
    device = on_device(*(own.clone() for own in host))
    pairs = torch.tensor([[0, 2], [2, 3], [1, 1]])
    cache.store_kv(k, v, slots, *host)
    cache.store_kv(*on_device(k, v, slots), *device)
    cache.copy_blocks(*host, pairs)
    cache.copy_blocks(*device, pairs.cuda())
    assert all(torch.equal(a.cpu(), b) for a, b in zip(device, host, strict=True))


def test_wrong_values_answer_nan_and_fault_nothing() -> None:
    q, k, v, starts, lengths, tables = on_device(*paged([1] * 4, [40] * 4, 16, (2, 1, 8, 8), torch.float32))
    lengths[0], lengths[1], tables[2, 1] = 0, 4000, 99
    got = attention.paged_attention(q, k, v, starts, lengths, tables, scale=0.3)
    assert got.isnan().flatten(1).all(1).tolist() == [True] * 3 + [False]
    before = k.clone()
    cache.store_kv(k[0, :2], v[0, :2], torch.tensor([-1, 10**9]).cuda(), k, v)
    assert torch.equal(k.nan_to_num(), before.nan_to_num())


def test_bad_arguments_raise() -> None:
    q, k, v, starts = on_device(*packed([4], (2, 1, 8, 8), torch.float32))
    with pytest.raises(RuntimeError, match="k: expected a tensor on the device of q"):
        torch.ops.pyruntime.packed_attention(q, k.cpu(), v, starts, True, 0.3, -1, -1, 0.0, None)
    with pytest.raises(RuntimeError, match="k: expected the dtype of q"):
        attention.packed_attention(q, k.half(), v, starts, causal=True, scale=0.3)
    wide = torch.randn(4, 1, 513).cuda()
    with pytest.raises(RuntimeError, match="heads must be at most 512 wide on CUDA"):
        attention.packed_attention(wide, wide, v, starts_of([4]).cuda(), causal=True, scale=0.3)
    with pytest.raises(RuntimeError, match="window_left: must be -1"):
        attention.packed_attention(q, k, v, starts, causal=True, scale=0.3, window_left=-2)
