"""The linear over int8 weights and rows against float64 products of what was quantised, and the quantisation."""

from __future__ import annotations

import math

import pytest
import torch

from pyruntime.ops import linear, quantized, reference

# In 16 bits elements stand at the very middle between two steps of their int8 often enough to be seen going either way.
TOLERANCE = {torch.float32: 2e-4, torch.float16: 8e-2, torch.bfloat16: 8e-2}
# Every remainder of the tiles of rows and panels, of a word and of a group, and more than one block of rows.
SHAPES = [
    (1, 1, 1), (2, 3, 5), (3, 4, 16), (5, 127, 47), (11, 128, 49), (13, 129, 50), (7, 640, 100), (31, 260, 97),
    (12, 300, 17), (515, 40, 65), (1030, 16, 33),
]  # fmt: skip


def rows(count: int, depth: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """With one element far larger than the others, as hidden rows of decoders have."""
    x = torch.randn(count, depth)
    x[:, depth // 2] *= 30
    return x.to(dtype)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("activation", linear.ACTIVATIONS)
def test_matches_reference(activation: str, dtype: torch.dtype) -> None:
    # An activation comes behind all that depends on the shape.
    for count, depth, columns in SHAPES if activation == "gelu" else SHAPES[3:7]:
        x = rows(count, depth, dtype)
        w, up = (torch.randn(columns, depth) / math.sqrt(depth) for _ in range(2))
        packed, gate, bias = quantized.pack_int8(w), quantized.pack_int8(up), torch.randn(columns).to(dtype)
        for added, second in ((None, None), (bias, None), (None, up)):
            got = quantized.linear_int8(x, packed, columns, added, None if second is None else gate, activation)
            want = reference.linear_int8(x, w, added, second, activation)
            assert got.dtype == dtype and got.shape == (count, columns)
            error = (got.double() - want).abs() / want.abs().clamp(min=1)
            assert error.max() < TOLERANCE[dtype], (count, depth, columns)


def test_a_row_has_the_same_bits_whatever_is_beside_it() -> None:
    x, w, up = rows(600, 333), quantized.pack_int8(torch.randn(200, 333)), quantized.pack_int8(torch.randn(200, 333))
    for gate in (None, up):
        together = quantized.linear_int8(x, w, 200, None, gate, "gelu")
        wide = torch.full((600, 340), math.nan)
        wide[:, 3:336] = x  # what lies beside a row is not read
        assert torch.equal(quantized.linear_int8(wide[:, 3:336], w, 200, None, gate, "gelu"), together)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        for begin, end in ((0, 1), (5, 7), (9, 12), (30, 37), (100, 111), (580, 600)):
            assert torch.equal(quantized.linear_int8(x[begin:end], w, 200, None, gate, "gelu"), together[begin:end])
        torch.set_num_threads(threads)


def test_the_error_of_quantisation_is_small() -> None:
    x, w = torch.randn(40, 640), torch.randn(300, 640) / math.sqrt(640)
    got, want = quantized.linear_int8(x, quantized.pack_int8(w), 300), x @ w.T
    assert torch.nn.functional.cosine_similarity(got, want, dim=-1).min() > 0.9998
    x[:, 77] = 1000.0  # spoils its own group alone
    w[:, 77] = 0.0
    got, want = quantized.linear_int8(x, quantized.pack_int8(w), 300), x @ w.T
    assert torch.nn.functional.cosine_similarity(got, want, dim=-1).min() > 0.85


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_comes_out_as_nan(bad: float) -> None:
    x, w = torch.randn(9, 200), quantized.pack_int8(torch.randn(40, 200))
    good = quantized.linear_int8(x, w, 40)
    x[4, 150] = bad
    got = quantized.linear_int8(x, w, 40)
    assert got[4].isnan().all()
    good[4], got[4] = 0, 0
    assert torch.equal(got, good)


def test_zeros_and_what_is_next_to_them() -> None:
    w = torch.randn(16, 200)
    w[3] = 0
    x = torch.stack((torch.zeros(200), torch.full((200,), 1e-38), torch.full((200,), 3e38)))
    got = quantized.linear_int8(x, quantized.pack_int8(w), 16)
    assert not got[:2].any() and not got[:, 3].any() and got[2].isfinite().any()


def test_into_memory_that_is_there() -> None:
    x, w, bias = rows(11, 40), quantized.pack_int8(torch.randn(70, 40)), torch.randn(70)
    memory = torch.full((11, 80), 7.0)
    quantized.linear_int8_into(memory[:, :70], x, w, bias)
    assert torch.equal(memory[:, :70], quantized.linear_int8(x, w, 70, bias))
    assert (memory[:, 70:] == 7).all()
    assert quantized.linear_int8(x[:0], w, 70).shape == (0, 70)


def test_quantisation_is_within_half_a_scale() -> None:
    w = torch.randn(50, 3, 100)
    w[3] = 0
    w[4] *= 1e-30
    q, scales = quantized.quantize_int8(w)
    assert q.dtype == torch.int8 and not q[3].any() and torch.equal(scales, scales.bfloat16().float())
    assert (q[[0, 1, 2, 4]].abs().amax(-1) >= 126).all() and (q.abs() <= 127).all()
    assert ((q * scales[..., None] - w).abs() <= scales[..., None] * 0.5001).all()
    with pytest.raises(ValueError, match="NaN or infinity"):
        quantized.quantize_int8(torch.tensor([[1.0, torch.nan]]))


@pytest.mark.parametrize("depth", [100, 128, 300])
def test_numbers_of_rows_reach_from_the_least_to_the_largest(depth: int) -> None:
    """Rows on one side of zero, with what is exactly zero among them, lose no half of their steps."""
    w = torch.eye(16, depth) * 127 / 128  # exact as int8: each column shows one element as it was kept
    for low, high in ((0.0, 1.0), (-1.0, 0.0), (-0.1, 2.0), (-3.0, 0.5), (5.0, 6.0), (-6.0, -5.0)):
        x = torch.rand(500, depth) * (high - low) + low
        x[:, 3] = 0.0
        got = quantized.linear_int8(x, quantized.pack_int8(w), 16)
        span = max(high, 0.0) - min(low, 0.0)
        assert (got * 128 / 127 - x[:, :16]).abs().max() <= span / 254 * 0.501 and not got[:, 3].any()


def test_packing_slice_by_slice_is_packing_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    w = torch.randn(101, 50)
    whole = quantized.pack_int8(w)
    assert whole.shape == (7, 64 * 14) and whole.dtype is torch.uint8
    monkeypatch.setattr(quantized, "SLICE", 32)
    assert torch.equal(quantized.pack_int8(w), whole)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w": torch.zeros(1, 128, dtype=torch.uint8)}, r"w: expected shape \[1, 192\]"),
        ({"w": torch.zeros(1, 192)}, "w: expected dtype Byte"),
        ({"columns": 17}, r"w: expected shape \[2, 192\]"),
        ({"columns": -1}, "columns: must be at least 0"),
        ({"up": torch.zeros(2, 192, dtype=torch.uint8)}, "up: expected shape"),
        ({"bias": torch.ones(5)}, "bias: expected shape"),
        ({"bias": torch.ones(4), "up": torch.zeros(1, 192, dtype=torch.uint8)}, "bias: not with up"),
        ({"x": torch.zeros(2, 8, dtype=torch.int8)}, "x: expected float32"),
        ({"x": torch.zeros(8)}, "x: expected shape"),
        ({"x": torch.zeros(8, 8).T}, "last dimension"),
    ],
)
def test_bad_input_raises(change: dict, message: str) -> None:
    arguments = {"x": torch.randn(2, 8), "w": torch.zeros(1, 192, dtype=torch.uint8), "columns": 4}
    with pytest.raises(RuntimeError, match=message):
        quantized.linear_int8(**{**arguments, **change})
    with pytest.raises(RuntimeError, match="out: expected the dtype of x"):
        quantized.linear_int8_into(torch.zeros(2, 4).half(), arguments["x"], arguments["w"])  # type: ignore[arg-type]
