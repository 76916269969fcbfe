"""Norms and rotations against their float64 twins."""

from __future__ import annotations

import math

import pytest
import torch

from pyruntime.ops import between, reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Half a unit in the last place of the dtype, and what float32 loses on the way.
RELATIVE = {torch.float32: 4e-6, torch.bfloat16: 4.1e-3, torch.float16: 6e-4}
SHAPES = [(1, 1), (3, 17), (70, 640), (5, 384), (2, 2048), (3, 1100), (300, 72)]


def near(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.double(), want, rtol=RELATIVE[got.dtype], atol=RELATIVE[got.dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_match_reference(dtype: torch.dtype) -> None:
    for rows, width in SHAPES:
        x, residual = (torch.randn(rows, width).to(dtype) for _ in range(2))
        weight, bias = (torch.randn(width).to(dtype) for _ in range(2))
        for epsilon, offset in ((1e-6, 0.0), (1e-5, 1.0)):
            near(between.rms_norm(x, weight, epsilon, offset), reference.rms_norm(x, weight, epsilon, offset))
        for added, scale, shift in ((residual, weight, bias), (None, weight, bias), (residual, None, None)):
            got = between.layer_norm(x, added, scale, shift, 1e-12 if width > 1 else 1e-5)
            near(got, reference.layer_norm(x, added, scale, shift, 1e-12 if width > 1 else 1e-5))


def test_rows_of_a_large_mean_keep_their_variance() -> None:
    x = torch.randn(4, 640) * 1e-2 + 1000
    got, want = between.layer_norm(x, None, None, None, 0.0), reference.layer_norm(x, None, None, None, 0.0)
    assert (got - want).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotations_match_reference(dtype: torch.dtype) -> None:
    for tokens, heads, width in ((1, 1, 2), (5, 4, 64), (3, 2, 34), (300, 4, 80)):
        cos, sin = (torch.randn(tokens, width).to(dtype) for _ in range(2))
        dense = torch.randn(tokens, heads, width).to(dtype)
        strided = torch.randn(heads, tokens, width + 3).to(dtype).transpose(0, 1)[:, :, :width]
        for x in (dense, strided):
            near(between.rotate_halves(x, cos, sin), reference.rotate_halves(x, cos, sin))


def test_a_row_does_not_depend_on_the_others() -> None:
    x, weight = torch.randn(400, 100), torch.randn(100)
    together = between.rms_norm(x, weight, 1e-6), between.layer_norm(x, x, weight, None, 1e-6)
    torch.set_num_threads(1)
    for row in (0, 7, 399):
        one = x[row : row + 1]
        assert torch.equal(between.rms_norm(one, weight, 1e-6)[0], together[0][row])
        assert torch.equal(between.layer_norm(one, one, weight, None, 1e-6)[0], together[1][row])


def test_nan_stays_in_its_row() -> None:
    x = torch.randn(3, 20)
    x[1, 4] = math.nan
    for y in (between.rms_norm(x, torch.ones(20), 1e-6), between.layer_norm(x, None, None, None, 1e-6)):
        assert y.isfinite().all(-1).tolist() == [True, False, True]


def test_nothing_is_written_or_read_beyond_a_row() -> None:
    wide = torch.full((3, 24), math.nan)
    wide[:, :19] = torch.randn(3, 19)
    assert between.rms_norm(wide[:, :19], torch.ones(19), 1e-6).isfinite().all()
    assert between.layer_norm(wide[:, :19], wide[:, :19], None, None, 1e-6).isfinite().all()


def test_bad_arguments_are_named() -> None:
    x = torch.randn(2, 8)
    with pytest.raises(RuntimeError, match=r"weight: expected shape \[8\]"):
        between.rms_norm(x, torch.ones(9), 1e-6)
    with pytest.raises(RuntimeError, match="weight: expected the dtype of x"):
        between.rms_norm(x, torch.ones(8).half(), 1e-6)
    with pytest.raises(RuntimeError, match="epsilon: must be at least 0"):
        between.rms_norm(x, torch.ones(8), -1.0)
    with pytest.raises(RuntimeError, match=r"residual: expected shape \[2, 8\]"):
        between.layer_norm(x, torch.randn(3, 8), None, None, 1e-6)
    with pytest.raises(RuntimeError, match="x: expected an even width"):
        between.rotate_halves(torch.randn(2, 1, 3), torch.randn(2, 3), torch.randn(2, 3))
    with pytest.raises(RuntimeError, match=r"sin: expected shape \[2, 4\]"):
        between.rotate_halves(torch.randn(2, 1, 4), torch.randn(2, 4), torch.randn(3, 4))
