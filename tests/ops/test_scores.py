"""The linear for few rows and the scores over it, against their float64 twins."""

from __future__ import annotations

import math

import pytest
import torch

from pyruntime.ops import linear, reference, scores

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OUTPUT_TOLERANCE = {torch.float32: 1e-5, torch.float16: 8e-3, torch.bfloat16: 6e-2}


def problem(rows: int, columns: int, depth: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    weight = torch.randn(columns, depth) / math.sqrt(depth)
    return torch.randn(rows, depth).to(dtype), weight.to(dtype), torch.randn(columns).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("depth", [1, 7, 16, 33, 640, 1000])
def test_matches_reference(depth: int, dtype: torch.dtype) -> None:
    for rows in (1, 2, 3, 7, 32):
        for columns in (1, 2, 99, 2049):
            x, w, b = problem(rows, columns, depth, dtype)
            for bias in (None, b):
                want = reference.linear_rows(x, w, bias)
                got = linear.linear_rows(x, w, bias)
                assert got.dtype == dtype
                assert (got.double() - want).abs().max() < OUTPUT_TOLERANCE[dtype]
                for softcap, scale in ((0.0, 1.0), (5.0, 0.7)):
                    want = reference.logsumexp(x, w, bias, softcap=softcap, scale=scale)
                    got = scores.logsumexp(x, w, bias, softcap=softcap, scale=scale)
                    assert (got.double() - want).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
def test_ragged_labels_match_reference(dtype: torch.dtype) -> None:
    x, w, b = problem(6, 500, 96, dtype)
    starts = torch.tensor([0, 0, 1, 17, 17, 117, 120]).int()
    labels = torch.randint(0, 500, (120,))
    for bias in (None, b):
        got = scores.label_logits(x, w, bias, labels, starts)
        assert got.dtype == torch.float32
        assert (got.double() - reference.label_logits(x, w, bias, labels, starts)).abs().max() < 1e-5


def test_row_is_bit_identical_alone_in_any_batch_and_with_any_threads() -> None:
    x, w, b = problem(13, 5000, 640, torch.bfloat16)
    starts = torch.arange(14).int() * 3
    labels = torch.randint(0, 5000, (39,))
    together = linear.linear_rows(x, w, b), scores.logsumexp(x, w, b), scores.label_logits(x, w, b, labels, starts)
    torch.set_num_threads(1)
    for i in range(13):
        row = x[i : i + 1]
        assert torch.equal(linear.linear_rows(row, w, b)[0], together[0][i])
        assert torch.equal(scores.logsumexp(row, w, b)[0], together[1][i])
        own = scores.label_logits(row, w, b, labels[3 * i : 3 * i + 3], starts[:2])
        assert torch.equal(own, together[2][3 * i : 3 * i + 3])


def test_extreme_logits() -> None:
    weight = torch.eye(16)
    rows = torch.full((4, 16), -torch.inf)
    rows[0, 3] = 2.0
    rows[1] = 1e4
    rows[2] = -1e4
    # One column at a time keeps 0 * inf out of the products: the twin of a one-hot weight is the row itself.
    finite = scores.logsumexp(rows[1:3], weight)
    assert torch.allclose(finite, torch.logsumexp(rows[1:3], -1))
    one = scores.logsumexp(torch.tensor([[1.0]]), torch.tensor([[2.0], [-torch.inf], [-torch.inf]]))
    assert one.item() == pytest.approx(2.0)
    none = scores.logsumexp(torch.tensor([[1.0]]), torch.tensor([[-torch.inf], [-torch.inf]]))
    assert none.item() == -math.inf
    assert scores.logsumexp(torch.tensor([[torch.nan], [1.0]]), torch.ones(40, 1)).isnan().tolist() == [True, False]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("columns", [1, 40, 5000])
def test_rows_of_bad_logits_answer_nan(columns: int, bad: float) -> None:
    for column in {0, columns // 2, columns - 1}:
        weight = torch.randn(columns, 1)
        weight[column] = bad
        for options in ({}, {"softcap": 2.0}):
            got = scores.logsumexp(torch.tensor([[1.0], [2.0], [3.0]]), weight, **options)
            assert (got.isfinite() if bad == torch.inf and options else got.isnan()).all()
    # Beside nothing but -inf, in each lane.
    for column in range(0, columns, 7):
        weight = torch.full((columns, 1), -torch.inf)
        weight[column] = bad
        assert scores.logsumexp(torch.ones(1, 1), weight).isnan().all()
    # Every logit of the first row alone.
    rows = torch.tensor([[torch.nan], [1.0]])
    assert scores.logsumexp(rows, torch.ones(columns, 1)).isnan().tolist() == [True, False]
    logprobs = scores.token_logprobs(rows, torch.ones(columns, 1), None, torch.zeros(2).long())
    assert logprobs.isnan().tolist() == [True, False]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"label_ids": torch.tensor([0, 99])}, "label_ids: entry 1 is 99"),
        ({"label_ids": torch.tensor([-1, 0])}, "label_ids: entry 0 is -1"),
        ({"label_starts": torch.tensor([0, 1, 2]).int()}, "label_starts: expected shape"),
        ({"weight": torch.randn(10, 9)}, "weight: expected shape"),
        ({"weight": torch.randn(10, 8).half()}, "weight: expected the dtype"),
        ({"bias": torch.randn(9)}, "bias: expected shape"),
    ],
)
def test_bad_labels_raise(change: dict, message: str) -> None:
    arguments = {"rows": torch.randn(1, 8), "weight": torch.randn(10, 8), "bias": None}
    labels = {"label_ids": torch.tensor([0, 9]), "label_starts": torch.tensor([0, 2]).int()}
    with pytest.raises(RuntimeError, match=message):
        scores.label_logits(**{**arguments, **labels, **change})


def test_bad_products_raise() -> None:
    with pytest.raises(RuntimeError, match="w: expected shape"):
        linear.linear_rows(torch.randn(2, 8), torch.randn(4, 9))
    with pytest.raises(RuntimeError, match="x: expected a tensor, got None"):
        linear.linear_rows(None, torch.randn(4, 9))
    with pytest.raises(RuntimeError, match="w: expected a tensor, got None"):
        linear.linear_rows(torch.randn(2, 8), None)
    for value in (-1.0, torch.inf, torch.nan, 1e39, 1e308, 1e-40):
        with pytest.raises(RuntimeError, match="softcap: must be"):
            scores.logsumexp(torch.randn(2, 8), torch.randn(4, 8), softcap=value)
    with pytest.raises(RuntimeError, match="at least one row"):
        scores.logsumexp(torch.randn(2, 8), torch.randn(0, 8))
