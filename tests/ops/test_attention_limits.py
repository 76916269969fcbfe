"""Attention at its limits: keys that a row does not see, windows and scalars beyond what the kernels count in."""

from __future__ import annotations

import pytest
import torch

from pyruntime.ops import attention

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HUGE = 2**63 - 1


def starts_of(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"causal": True, "window_left": 40},
        {"causal": False, "window_left": 3, "window_right": 2},
        {"causal": False, "window_left": 0, "window_right": 0},
    ],
    ids=str,
)
def test_hidden_keys_and_values_do_not_matter(options: dict, poison: float, dtype: torch.dtype) -> None:
    """Rows that see the poisoned key are poisoned, all others keep their bits."""
    for heads, width in (((2, 1), 64), ((4, 4), 20)):
        for rows, at in ((3, 2), (70, 0), (200, 30), (200, 69), (700, 600)):
            q = torch.randn(rows, heads[0], width).to(dtype)
            k, v = torch.randn(2, rows, heads[1], width).to(dtype)
            clean = attention.packed_attention(q, k, v, starts_of(rows), scale=0.1, **options)
            k[at], v[at] = poison, poison
            got = attention.packed_attention(q, k, v, starts_of(rows), scale=0.1, **options)
            below = torch.arange(rows) - at
            sees = below >= (0 if options["causal"] else -options["window_right"])
            sees &= below <= options.get("window_left", rows)
            assert not got[sees].isfinite().any()
            assert torch.equal(got[~sees], clean[~sees])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("queries", [1, 3, 50])
def test_keys_below_the_window_may_lie_in_freed_pages(queries: int, dtype: torch.dtype) -> None:
    """Their table entries point at pages of somebody else, here all NaN."""
    for keys in (100, 127, 640):
        q = torch.randn(queries, 4, 64).to(dtype)
        k, v = torch.randn(2, keys + 2, 1, 2, 64).to(dtype)
        tables = torch.arange(keys).int()[None]
        options = {"scale": 0.125, "window_left": 20}
        arguments = (starts_of(queries), torch.tensor([keys]).int())
        want = attention.paged_attention(q, k, v, *arguments, tables, **options)
        k[-1], v[-1] = torch.nan, torch.nan
        tables[0, : keys - queries - 20] = keys + 1
        assert torch.equal(attention.paged_attention(q, k, v, *arguments, tables, **options), want)


def test_windows_beyond_any_sequence_are_no_windows() -> None:
    q, k, v = torch.randn(3, 90, 2, 16)
    for causal in (False, True):
        want = attention.packed_attention(q, k, v, starts_of(90), causal=causal, scale=0.25)
        for left, right in ((HUGE, HUGE), (-1, HUGE), (HUGE, -1), (2**31, 2**32)):
            options = {"causal": causal, "scale": 0.25, "window_left": left, "window_right": right}
            assert torch.equal(attention.packed_attention(q, k, v, starts_of(90), **options), want)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan, 1e39, -1e39, 1e308, 1e-40, 1e-300])
def test_scalars_beyond_float32_raise(value: float) -> None:
    q, k, v = torch.randn(3, 4, 2, 16)
    pages = (k[:, None], v[:, None], starts_of(4), torch.tensor([4]).int(), torch.arange(4).int()[None])
    for bad, options in (("scale", {"scale": value}), ("softcap", {"scale": 1.0, "softcap": value})):
        with pytest.raises(RuntimeError, match=f"{bad}: must be"):
            attention.packed_attention(q, k, v, starts_of(4), causal=True, **options)
        with pytest.raises(RuntimeError, match=f"{bad}: must be"):
            attention.paged_attention(q, *pages, **options)
    assert attention.packed_attention(q, k, v, starts_of(4), causal=True, scale=0.0, softcap=1e-30).isfinite().all()
