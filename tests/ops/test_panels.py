"""Linears with activations and gates, for few rows and for many, against their float64 twin."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from pyruntime.ops import linear, reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 8e-3, torch.bfloat16: 6e-2}
# Rows that leave every remainder of the tiles, more than one block of rows, widths on both sides of a panel's.
SHAPES = [(1, 1, 1), (2, 3, 5), (13, 33, 50), (7, 640, 100), (70, 127, 48), (95, 64, 17), (515, 40, 97), (1030, 16, 49)]


def products(dtype: torch.dtype) -> list[object]:
    has = linear.has_panels(dtype)
    return [linear.linear_rows, *([linear.linear_panels] if has else [])]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", linear.ACTIVATIONS)
def test_matches_reference(activation: str, dtype: torch.dtype) -> None:
    for product, (rows, depth, columns) in itertools.product(products(dtype), SHAPES):
        if product is linear.linear_rows and rows > 100:
            continue
        x = torch.randn(rows, depth).to(dtype)
        w, up = ((torch.randn(columns, depth) / math.sqrt(depth)).to(dtype) for _ in range(2))
        bias = torch.randn(columns).to(dtype)
        for added, gate in ((None, None), (bias, None), (None, up)):
            got = product(x, w, added, gate, activation)  # type: ignore[operator]
            want = reference.linear_rows(x, w, added, gate, activation)
            assert got.dtype == dtype and got.shape == (rows, columns)
            # A gated product of few rows is rounded before and after; errors grow with its size.
            error = (got.double() - want).abs() / want.abs().clamp(min=1)
            assert error.max() < TOLERANCE[dtype], (rows, depth, columns)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_far_from_zero(dtype: torch.dtype) -> None:
    x = torch.tensor([-1e30, -300.0, -88.5, -20.0, -5.0, -1e-3, 0.0, 1e-3, 5.0, 20.0, 88.5, 300.0, 1e30]).to(dtype)
    one = torch.ones(1, 1, dtype=dtype)
    for product, name in itertools.product(products(dtype), linear.ACTIVATIONS):
        got = product(x[:, None], one, None, None, name)[:, 0]  # type: ignore[operator]
        want = linear.ACTIVATIONS[name](x.double())
        torch.testing.assert_close(got.double(), want, atol=1e-6, rtol=1e-2 if dtype is torch.bfloat16 else 1e-5)


def test_panels_leave_nan_where_it_is() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        if not linear.has_panels(dtype):
            continue
        x, w = torch.randn(20, 33).to(dtype), torch.randn(50, 33).to(dtype)
        wide = torch.full((20, 35), math.nan, dtype=dtype)
        wide[:, :33] = x  # what lies behind an odd row is not read
        assert torch.equal(linear.linear_panels(wide[:, :33], w), linear.linear_panels(x, w))
        x[3, 4], w[7, 2] = math.nan, math.inf
        bad = ~linear.linear_panels(x, w).isfinite()
        want = torch.zeros(20, 50, dtype=torch.bool)
        want[3], want[:, 7] = True, True
        assert torch.equal(bad, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_panels_does_not_depend_on_the_others_or_the_threads(dtype: torch.dtype) -> None:
    if not linear.has_panels(dtype):
        return
    x, w = torch.randn(37, 640).to(dtype), torch.randn(200, 640).to(dtype)
    together = linear.linear_panels(x, w, None, None, "gelu")
    torch.set_num_threads(1)
    for begin, end in ((0, 1), (5, 8), (30, 37)):
        assert torch.equal(linear.linear_panels(x[begin:end], w, None, None, "gelu"), together[begin:end])


@pytest.mark.parametrize("by_panels", [False, True])
def test_into_memory_that_is_there(by_panels: bool) -> None:
    x, w, bias = torch.randn(11, 40), torch.randn(70, 40), torch.randn(70)
    if by_panels and not linear.has_panels(torch.float32):
        with pytest.raises(RuntimeError, match="no such kernel on this processor"):
            linear.linear_into(torch.empty(11, 70), x.half(), w.half(), by_panels=True)
        return
    memory = torch.full((11, 80), 7.0)
    linear.linear_into(memory[:, :70], x, w, bias, by_panels)
    product = linear.linear_panels if by_panels else linear.linear_rows
    assert torch.equal(memory[:, :70], product(x, w, bias))
    assert (memory[:, 70:] == 7).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_matrix_answers_the_same_bits(dtype: torch.dtype) -> None:
    """For every number of rows up to more than one tile, and with one thread as with two."""
    if not linear.has_panels(dtype):
        return
    for depth, columns in ((1, 16), (33, 64), (130, 48), (640, 400)):
        w, up, bias = torch.randn(columns, depth).to(dtype), torch.randn(columns, depth).to(dtype), torch.randn(columns)
        packed, gate = linear.pack_panels(w), linear.pack_panels(up)
        assert packed.shape == (columns // 16, -(-depth * w.element_size() // 4), 16, 4 // w.element_size())
        x = torch.randn(600, depth).to(dtype)
        many = linear.linear_panels(x, w, bias, None, "gelu")
        gated = linear.linear_panels(x, w, None, up, "silu")
        for count in (*range(1, 20), 600):
            torch.set_num_threads(1 + count % 2)
            assert torch.equal(linear.linear_panels(x[:count], packed, bias, None, "gelu"), many[:count])
            assert torch.equal(linear.linear_panels(x[:count], packed, None, gate, "silu"), gated[:count])
        memory = torch.full((5, columns + 3), 7.0, dtype=dtype)
        linear.linear_into(memory[:, :columns], x[:5], packed, bias, by_panels=True)
        assert torch.equal(memory[:, :columns], linear.linear_panels(x[:5], w, bias))
        assert (memory[:, columns:] == 7).all()
    assert linear.linear_panels(x[:0], packed).shape == (0, 400)


def test_bad_packed_matrices_are_named() -> None:
    with pytest.raises(ValueError, match="whole panels of 16 columns, got 17"):
        linear.pack_panels(torch.randn(17, 8))
    x, w = torch.randn(2, 8), linear.pack_panels(torch.randn(32, 8))
    for bad, message in (
        ((x, w[:, :7]), r"w: expected shape \[any, 8, 16, 1\]"),
        ((x, w.transpose(0, 1).contiguous().transpose(0, 1)), "w: expected a contiguous tensor"),
        ((x, w.bfloat16()), "w: expected the dtype of x"),
        ((x, w, None, w[:1]), r"up: expected shape \[2, 8, 16, 1\]"),
        ((x, w, None, w[:, :, :, 0]), r"up: expected shape \[2, 8, 16, 1\]"),
        ((x, w, torch.randn(31)), r"bias: expected shape \[32\]"),
    ):
        with pytest.raises(RuntimeError, match=message):
            linear.linear_panels(*bad)
    with pytest.raises(RuntimeError, match=r"w: expected shape"):
        linear.linear_rows(x, w)


def test_panels_of_a_dtype_that_has_none_are_refused() -> None:
    with pytest.raises(RuntimeError, match="no such kernel on this processor"):
        linear.linear_panels(torch.randn(2, 8).half(), torch.randn(4, 8).half())


def test_bad_arguments_are_named() -> None:
    x, w = torch.randn(2, 8), torch.randn(4, 8)
    with pytest.raises(RuntimeError, match=r"up: expected shape \[4, 8\]"):
        linear.linear_rows(x, w, None, torch.randn(5, 8))
    with pytest.raises(RuntimeError, match="up: expected the dtype of w"):
        linear.linear_rows(x, w, None, w.bfloat16())
    with pytest.raises(RuntimeError, match="up: expected the strides of w"):
        linear.linear_rows(x, w, None, torch.randn(4, 9)[:, :8])
    with pytest.raises(RuntimeError, match="bias: not with up"):
        linear.linear_rows(x, w, torch.randn(4), w)
    with pytest.raises(RuntimeError, match=r"activation: must be 0 \(none\).*, got 4"):
        torch.ops.pyruntime.linear_rows(x, w, None, None, 4)
    with pytest.raises(RuntimeError, match=r"out: expected shape \[2, 4\]"):
        linear.linear_into(torch.empty(2, 5), x, w)
