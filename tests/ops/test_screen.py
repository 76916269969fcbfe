"""The largest product of each row by bounds, to the bit what the whole product gives."""

from __future__ import annotations

import math

import pytest
import torch

from pyruntime.ops import linear, screen

DTYPES = [dtype for dtype in (torch.float32, torch.bfloat16) if linear.has_panels(dtype)]
pytestmark = pytest.mark.skipif(not DTYPES, reason="no products by panels on this processor")
ROWS = [1, 3, 12, 13, 70]


def whole(x: torch.Tensor, panels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """By all products; numpy takes the first of equal ones."""
    products = linear.linear_panels(x, panels).float()
    ids = torch.from_numpy(products.numpy().argmax(1))
    return ids, products.gather(1, ids[:, None])[:, 0]


def decided(x: torch.Tensor, w: torch.Tensor, bounds: screen.Screen | None = None) -> float:
    """Checks what is decided, and says how much that is."""
    panels, own = linear.pack_panels(w), bounds or screen.make_screen(w)
    assert own is not None
    ids, values = screen.largest_columns(x, panels, own)
    want_ids, want_values = whole(x, panels)
    known = ids >= 0
    assert torch.equal(ids[known], want_ids[known]) and torch.equal(values[known], want_values[known])
    return float(known.float().mean())


def likely(rows: int, w: torch.Tensor, noise: float = 0.3) -> torch.Tensor:
    """Rows each of which is near one of the columns."""
    near = w[torch.randint(0, w.shape[0], (rows,))].float()
    return (near + noise * torch.randn_like(near)).to(w.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(16, 640), (48, 1), (624, 100), (1600, 33), (1040, 640), (800, 257)])
def test_rows_near_a_column(shape: tuple[int, int], dtype: torch.dtype) -> None:
    w = torch.randn(shape).to(dtype)
    for rows in ROWS:
        assert decided(likely(rows, w), w) > (0.9 if min(shape) > 90 else -1.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_like_no_column(dtype: torch.dtype) -> None:
    for scale in (1e-6, 1e6):
        w = torch.randn(1600, 256).to(dtype) * scale
        assert decided((torch.randn(40, 256) * scale).to(dtype), w) > 0.5
        assert decided(-w[:20].abs(), w.abs()) >= 0.0  # all products are negative


@pytest.mark.parametrize("dtype", DTYPES)
def test_nearly_equal_columns(dtype: torch.dtype) -> None:
    """Copies of a column, each a last place of a few elements away from it, all over the matrix."""
    w = torch.randn(8000, 192).to(dtype)
    x = likely(24, w, 0.1)
    copies = torch.randperm(8000)[:300]
    w[copies] = x[0]
    bits = w.view(torch.int16 if dtype is torch.bfloat16 else torch.int32)
    bits[copies] += torch.randint(0, 2, (300, 192)).to(bits.dtype) * (torch.rand(300, 192) < 0.02).to(bits.dtype)
    assert decided(x, w) > 0.9


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_columns_go_to_the_lowest(dtype: torch.dtype) -> None:
    w = torch.randn(4000, 128).to(dtype)
    w[[3999, 1234, 1233, 1250]] = w[77].clone()
    x = torch.stack([w[77], w[1233] * 2, -w[5]])
    ids, _ = screen.largest_columns(x, linear.pack_panels(w), bounds_of(w))
    assert ids[:2].tolist() == [77, 77]
    assert decided(x, w) == 1.0


@pytest.mark.parametrize("dtype", DTYPES)
def test_outliers_in_rows_and_columns(dtype: torch.dtype) -> None:
    w = torch.randn(4000, 256).to(dtype)
    w[:, 5] *= 50
    w[100, 7] = 3e4
    x = likely(30, w)
    x[:, 9] *= 1000
    x[3, 200] = -1e6
    decided(x, w)
    x, w[100, 7] = likely(30, w), 1.0
    assert decided(x, w) > 0.9


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_without_bounds_are_left_open(dtype: torch.dtype) -> None:
    w = torch.randn(1600, 96).to(dtype)
    x = likely(13, w)
    x[0], x[2], x[5, 3], x[7, 90], x[9, 1], x[10, 0] = 0.0, 1e-20, math.nan, math.inf, -math.inf, 1e30
    ids, _ = screen.largest_columns(x, linear.pack_panels(w), bounds_of(w))
    assert set((ids < 0).nonzero()[:, 0].tolist()) == {0, 2, 5, 7, 9, 10}
    decided(x, w)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_for_which_all_columns_matter_are_left_open(dtype: torch.dtype) -> None:
    w = torch.randn(1, 96).to(dtype).expand(1600, 96).contiguous()
    ids, _ = screen.largest_columns(torch.randn(5, 96).to(dtype), linear.pack_panels(w), bounds_of(w))
    assert ids.tolist() == [-1] * 5


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_those_beside_it(dtype: torch.dtype) -> None:
    w = torch.randn(3200, 160).to(dtype)
    wide = torch.full((40, 170), math.nan, dtype=dtype)
    wide[:, 3:163] = likely(40, w)
    panels, own = linear.pack_panels(w), bounds_of(w)
    together = screen.largest_columns(wide[:, 3:163], panels, own)
    for begin, end in ((0, 1), (5, 17), (20, 40)):
        alone = screen.largest_columns(wide[begin:end, 3:163], panels, own)
        assert all(torch.equal(one, both[begin:end]) for one, both in zip(alone, together, strict=True))


def bounds_of(w: torch.Tensor) -> screen.Screen:
    made = screen.make_screen(w)
    assert made is not None
    return made


def unpacked(w: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """What the int8 stand for, float64."""
    columns, depth = w.shape
    words = packed.view(torch.int32).view(columns // 16, -1, 16)
    out, at = torch.zeros(columns, depth, dtype=torch.float64), 0
    for begin in range(0, depth, 128):
        count = min(128, depth - begin)
        used = -(-count // 4)
        part = words[:, at : at + used].contiguous().view(torch.int8).view(-1, used, 16, 4).transpose(1, 2)
        scales = (words[:, at + used] & -0x10000).view(torch.float32).double()
        out[:, begin : begin + count] = (part.reshape(columns, -1)[:, :count] * scales.reshape(-1, 1)).double()
        at += used + 1
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("depth", [640, 130, 3])
def test_lengths_are_rounded_up_and_close(depth: int, dtype: torch.dtype) -> None:
    w = (torch.randn(5008, depth) * torch.logspace(-3, 3, 5008)[:, None]).to(dtype)
    w[17] = 0.0
    own = bounds_of(w)
    values = unpacked(w, own.packed)
    for have, exact in ((own.errors, w.double() - values), (own.lengths, values)):
        want = exact.norm(dim=1)
        assert (have.double() >= want).all()
        assert (have.double() <= want * 1.001 + 1e-11).all()


def test_matrices_without_bounds() -> None:
    for bad in (math.nan, math.inf, 1e30):
        w = torch.randn(32, 8)
        w[9, 3] = bad
        assert screen.make_screen(w) is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_bounds_that_are_too_small_would_be_seen(dtype: torch.dtype) -> None:
    """Bounds of a hundredth give other columns where many are nearly the largest."""
    w = torch.randn(1, 192).expand(8000, 192) + 0.01 * torch.randn(8000, 192)
    w, x = w.to(dtype), (torch.randn(60, 192)).to(dtype)
    own = bounds_of(w)
    decided(x, w, own)
    with pytest.raises(AssertionError):
        decided(x, w, own._replace(errors=own.errors * 0.01, lengths=own.lengths * 0.01))


@pytest.mark.parametrize("dtype", DTYPES)
def test_refusals(dtype: torch.dtype) -> None:
    w = torch.randn(32, 8).to(dtype)
    panels, own = linear.pack_panels(w), bounds_of(w)
    x = torch.randn(2, 8).to(dtype)
    for rows, matrix, bounds, message in (
        (x[:, :5], panels, own, "w: expected shape"),
        (x.half(), panels, own, "w: expected the dtype of x"),
        (x, panels[:1], own, "errors: expected shape"),
        (x, panels, own._replace(packed=own.packed[:1]), "screen: expected shape"),
        (x, panels, own._replace(lengths=own.lengths.double()), "lengths: expected dtype"),
    ):
        with pytest.raises(RuntimeError, match=message):
            screen.largest_columns(rows, matrix, bounds)
    assert screen.largest_columns(x[:0], panels, own)[0].shape == (0,)
