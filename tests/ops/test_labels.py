"""Scores of labels, over these alone and over the whole vocabulary, and token logprobs, against their float64 twins."""

from __future__ import annotations

import math

import pytest
import torch

from pyruntime.ops import reference, scores

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
COUNTS = [0, 1, 10, 100, 0, 3]
SHAPES = [{}, {"softcap": 4.0}, {"scale": 0.3}, {"softcap": 6.0, "scale": 2.0}]


def problem(vocabulary: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """rows, weight, bias, label_ids, label_starts, temperature"""
    rows = (torch.randn(len(COUNTS), width) * 2).to(dtype)
    weight = (torch.randn(vocabulary, width) / math.sqrt(width)).to(dtype)
    starts = torch.tensor([0, *COUNTS]).cumsum(0).int()
    labels = torch.randint(0, vocabulary, (sum(COUNTS),))
    return rows, weight, torch.randn(vocabulary).to(dtype), labels, starts, torch.rand(len(COUNTS)) + 0.2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 7, 64, 384])
@pytest.mark.parametrize("vocabulary", [2, 99, 4099])
def test_matches_reference(vocabulary: int, width: int, dtype: torch.dtype) -> None:
    rows, weight, bias, labels, starts, temperature = problem(vocabulary, width, dtype)
    tokens = torch.randint(0, vocabulary, (len(COUNTS),))
    for options in SHAPES:
        for b in (None, bias):
            got = scores.label_scores(rows, weight, b, labels, starts, temperature, **options)
            want = reference.label_scores(rows, weight, b, labels, starts, temperature, **options)
            assert got.dtype == torch.float32 and (got.double() - want).abs().max() < 1e-5
            got = scores.label_probabilities(rows, weight, b, labels, starts, **options)
            want = reference.label_probabilities(rows, weight, b, labels, starts, **options)
            assert (got.double() - want).abs().max() < 1e-5
            got = scores.token_logprobs(rows, weight, b, tokens, **options)
            want = reference.token_logprobs(rows, weight, b, tokens, **options)
            assert (got.double() - want).abs().max() < 2e-5 and (got <= 0).all()


@pytest.mark.parametrize("vocabulary", [32_000, 262_144])
def test_matches_reference_at_real_width(vocabulary: int) -> None:
    rows, weight, _, labels, starts, temperature = problem(vocabulary, 64, torch.bfloat16)
    got = scores.label_probabilities(rows, weight, None, labels, starts)
    assert (got.double() - reference.label_probabilities(rows, weight, None, labels, starts)).abs().max() < 1e-6
    got = scores.label_scores(rows, weight, None, labels, starts, temperature)
    want = reference.label_scores(rows, weight, None, labels, starts, temperature)
    assert (got.double() - want).abs().max() < 1e-5


def test_row_is_bit_identical_alone_with_any_stride_and_any_threads() -> None:
    rows, weight, bias, labels, starts, temperature = problem(5000, 384, torch.bfloat16)
    tokens = torch.randint(0, 5000, (len(COUNTS),))
    wide_rows, wide_weight = torch.zeros(len(COUNTS), 400).bfloat16(), torch.zeros(5000, 390).bfloat16()
    wide_rows[:, 5:389], wide_weight[:, :384] = rows, weight
    softened = scores.label_scores(rows, weight, bias, labels, starts, temperature)
    whole = scores.label_probabilities(rows, weight, bias, labels, starts)
    logprobs = scores.token_logprobs(rows, weight, bias, tokens)
    strided = (wide_rows[:, 5:389], wide_weight[:, :384], bias)
    assert torch.equal(scores.label_probabilities(*strided, labels, starts), whole)
    assert torch.equal(scores.label_scores(*strided, labels, starts, temperature), softened)
    torch.set_num_threads(1)
    for r, count in enumerate(COUNTS):
        own, row = labels[starts[r] : starts[r + 1]], rows[r : r + 1]
        bounds, span = torch.tensor([0, count]).int(), slice(int(starts[r]), int(starts[r + 1]))
        alone = scores.label_scores(row, weight, bias, own, bounds, temperature[r : r + 1])
        assert torch.equal(alone, softened[span])
        assert torch.equal(scores.label_probabilities(row, weight, bias, own, bounds), whole[span])
        assert torch.equal(scores.token_logprobs(row, weight, bias, tokens[r : r + 1]), logprobs[r : r + 1])


def test_extreme_logits() -> None:
    weight = torch.tensor([[1.0], [-1.0], [1.0], [0.0], [-torch.inf]])
    labels, starts = torch.tensor([0, 1, 2, 3]), torch.tensor([0, 4]).int()
    one = torch.ones(1)
    for size, want in ((1e4, [0.5, 0, 0.5, 0]), (-1e4, [0, 1, 0, 0])):
        rows = torch.tensor([[size]])
        assert scores.label_scores(rows, weight, None, labels, starts, one).tolist() == want
    # Of the infinite entry nothing is left in the whole vocabulary either.
    assert scores.label_probabilities(torch.tensor([[1e4]]), weight, None, labels, starts).tolist() == [0.5, 0, 0.5, 0]
    equal = scores.label_scores(torch.zeros(1, 1), weight[:4], None, labels, starts, one)
    assert equal.tolist() == [0.25] * 4
    gone = scores.label_scores(torch.tensor([[torch.nan]]), weight, None, labels, starts, one)
    assert gone.isnan().all()
    single = scores.label_scores(torch.ones(1, 1), weight, None, labels[:1], torch.tensor([0, 1]).int(), one)
    assert single.tolist() == [1.0]


@pytest.mark.parametrize("temperature", [1e-38, 1e-30, 3e38])
def test_extreme_temperatures(temperature: float) -> None:
    weight = torch.tensor([[30.0], [10.0], [29.99], [-4e37]])
    got = scores.label_scores(
        torch.ones(1, 1), weight, None, torch.arange(4), torch.tensor([0, 4]).int(), torch.tensor([temperature])
    )
    if temperature < 1:
        assert got.tolist() == [1, 0, 0, 0]
    else:
        assert torch.allclose(got, torch.softmax(weight[:, 0].double() / temperature, 0).float())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"label_ids": torch.tensor([0, 10])}, "label_ids: entry 1 is 10, outside"),
        ({"label_ids": torch.tensor([-1, 0])}, "label_ids: entry 0 is -1, outside"),
        ({"label_ids": torch.tensor([0, 1]).int()}, "label_ids: expected dtype"),
        ({"label_starts": torch.tensor([0, 1, 2]).int()}, "label_starts: expected shape"),
        ({"temperature": torch.zeros(1)}, "temperature: entry 0"),
        ({"temperature": torch.ones(2)}, "temperature: expected shape"),
        ({"softcap": -1.0}, "softcap"),
        ({"softcap": 1e39}, "softcap: must be"),
        ({"softcap": 1e-40}, "softcap: must be"),
        ({"scale": math.inf}, "scale: must be"),
        ({"scale": 1e39}, "scale: must be"),
        ({"scale": 1e308}, "scale: must be"),
        ({"scale": -1e-40}, "scale: must be"),
        ({"weight": torch.randn(10, 7)}, "weight: expected shape"),
    ],
)
def test_bad_labels_raise(change: dict, message: str) -> None:
    arguments = {"rows": torch.randn(1, 8), "weight": torch.randn(10, 8), "bias": None, "temperature": torch.ones(1)}
    labels = {"label_ids": torch.tensor([0, 9]), "label_starts": torch.tensor([0, 2]).int()}
    with pytest.raises(RuntimeError, match=message):
        scores.label_scores(**{**arguments, **labels, **change})


def test_bad_tokens_raise() -> None:
    rows, weight = torch.randn(2, 8), torch.randn(10, 8)
    with pytest.raises(RuntimeError, match="token_ids: entry 1 is 10, outside"):
        scores.token_logprobs(rows, weight, None, torch.tensor([0, 10]))
    with pytest.raises(RuntimeError, match="token_ids: expected shape"):
        scores.token_logprobs(rows, weight, None, torch.tensor([0]))
    with pytest.raises(RuntimeError, match="at least one row"):
        scores.token_logprobs(rows[:0], weight[:0], None, torch.empty(0, dtype=torch.int64))
