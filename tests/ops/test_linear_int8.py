"""The linear over int8 weights against its float64 twin, and the quantisation."""

from __future__ import annotations

import pytest
import torch

from pyruntime.ops import linear, reference

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-2, torch.bfloat16: 2e-1}


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("depth", [1, 7, 16, 33, 640])
def test_matches_reference(depth: int, dtype: torch.dtype) -> None:
    for rows in (1, 3, 4, 9):
        for columns in (1, 2, 99, 2049):
            w = torch.randint(-127, 128, (columns, depth), dtype=torch.int8)
            scales, x = torch.rand(columns) / 127 / depth**0.5, torch.randn(rows, depth).to(dtype)
            for bias in (None, torch.randn(columns).to(dtype)):
                got = linear.linear_rows_int8(x, w, scales, bias)
                assert got.dtype == dtype
                want = reference.linear_rows_int8(x, w, scales, bias)
                assert (got.double() - want).abs().max() < TOLERANCE[dtype] * 0.2


def test_row_is_bit_identical_alone_with_any_stride_and_any_threads() -> None:
    w, scales = linear.quantize_int8(torch.randn(3001, 200))
    x = torch.randn(11, 200).bfloat16()
    together = linear.linear_rows_int8(x, w, scales)
    wide = torch.zeros(3001, 300, dtype=torch.int8)
    wide[:, 7:207] = w
    assert torch.equal(linear.linear_rows_int8(x, wide[:, 7:207], scales), together)
    torch.set_num_threads(1)
    for i in range(11):
        assert torch.equal(linear.linear_rows_int8(x[i : i + 1], w, scales)[0], together[i])


def test_quantisation_is_within_half_a_scale() -> None:
    w = torch.randn(50, 300)
    w[3] = 0
    w[4] *= 1e-30
    q, scales = linear.quantize_int8(w)
    assert q.dtype == torch.int8 and (q[[0, 1, 2, 4]].abs().amax(-1) == 127).all() and not q[3].any()
    assert ((q * scales[:, None] - w).abs() <= scales[:, None] * 0.5001).all()
    with pytest.raises(ValueError, match="NaN or infinity"):
        linear.quantize_int8(torch.tensor([[1.0, torch.nan]]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w": torch.zeros(4, 9, dtype=torch.int8)}, "w: expected shape"),
        ({"w": torch.zeros(4, 8)}, "w: expected int8"),
        ({"scales": torch.ones(5)}, "scales: expected shape"),
        ({"scales": torch.ones(4).half()}, "scales: expected dtype"),
        ({"bias": torch.ones(5)}, "bias: expected shape"),
        ({"x": torch.zeros(2, 8, dtype=torch.int8)}, "x: expected float32"),
        ({"w": torch.zeros(8, 4, dtype=torch.int8).T}, "last dimension"),
    ],
)
def test_bad_input_raises(change: dict, message: str) -> None:
    arguments = {"x": torch.randn(2, 8), "w": torch.zeros(4, 8, dtype=torch.int8), "scales": torch.ones(4)}
    with pytest.raises(RuntimeError, match=message):
        linear.linear_rows_int8(**{**arguments, **change})
