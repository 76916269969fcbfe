"""The CUDA score kernels against their float64 twins."""

from __future__ import annotations

import math

import pytest
import torch

from pyruntime.ops import reference, scores
from tests.emulation import calls
from tests.emulation.harness import RANDOM, REVERSE, Emulation

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 2, 1), (3, 99, 7), (9, 130, 64), (70, 333, 33), (20, 65, 1000), (2, 3001, 48)]
TOLERANCE = 5e-6  # of sums of at most 4096 products of unit scale in float32


def problem(rows: int, columns: int, depth: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    weight = torch.randn(columns, depth) / math.sqrt(depth)
    return torch.randn(rows, depth).to(dtype), weight.to(dtype), torch.randn(columns).to(dtype)


def some_labels(rows: int, columns: int, most: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    counts = torch.randint(0, most + 1, (rows,))
    counts[0] = most
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).int()
    return torch.randint(0, columns, (int(starts[-1]),)), starts


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_reference(emulation: Emulation, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    x, w, b = problem(*shape, dtype)
    ids, starts = some_labels(*shape[:2])
    tokens, temperature = torch.randint(0, shape[1], (shape[0],)), torch.rand(shape[0]) + 0.3
    for bias, softcap, scale in ((None, 0.0, 1.0), (b, 5.0, 0.7)):
        shaping = {"softcap": softcap, "scale": scale}
        got = calls.labels(emulation, x, w, bias, ids, starts)
        assert (got - reference.label_logits(x, w, bias, ids, starts)).abs().max() < TOLERANCE
        got = calls.labels(emulation, x, w, bias, ids, starts, temperature, **shaping)
        assert (got - reference.label_scores(x, w, bias, ids, starts, temperature, **shaping)).abs().max() < TOLERANCE
        got = calls.stream(emulation, x, w, bias, **shaping)
        assert (got - reference.logsumexp(x, w, bias, **shaping)).abs().max() < TOLERANCE
        got = calls.stream(emulation, x, w, bias, ids, starts, **shaping)
        assert (got - reference.label_probabilities(x, w, bias, ids, starts, **shaping)).abs().max() < TOLERANCE
        got = calls.stream(emulation, x, w, bias, tokens, **shaping)
        assert (got - reference.token_logprobs(x, w, bias, tokens, **shaping)).abs().max() < TOLERANCE


def test_at_real_width(emulation: Emulation) -> None:
    x, w, b = problem(2, 262_144, 16, torch.bfloat16)
    ids, starts = some_labels(2, 262_144, 100)
    got = calls.stream(emulation, x, w, b, ids, starts)
    want = reference.label_probabilities(x, w, b, ids, starts)
    assert ((got - want).abs() / want).max() < 1e-4


def test_wide_rows(emulation: Emulation) -> None:
    x, w, _ = problem(2, 99, 4096, torch.float32)
    assert (calls.stream(emulation, x, w, None) - reference.logsumexp(x, w, None)).abs().max() < TOLERANCE


def test_row_does_not_depend_on_batch_tile_order_or_stride(emulation: Emulation) -> None:
    x, w, b = problem(21, 200, 70, torch.bfloat16)
    together = calls.stream(emulation, x, w, b, softcap=9.0)
    assert torch.equal(calls.stream(emulation, x, w, b, softcap=9.0, tile_rows=64), together)
    for i in (0, 13, 20):
        assert calls.stream(emulation, x[i : i + 1].clone(), w, b, softcap=9.0)[0] == together[i]
    for order, seed in ((REVERSE, 0), (RANDOM, 1)):
        emulation.order, emulation.seed = order, seed
        assert torch.equal(calls.stream(emulation, x, w, b, softcap=9.0), together)
    wide_x, wide_w = torch.full((21, 77), torch.nan).bfloat16(), torch.full((200, 79), torch.nan).bfloat16()
    wide_x[:, 3:73], wide_w[:, 5:75] = x, w
    assert torch.equal(calls.stream(emulation, wide_x[:, 3:73], wide_w[:, 5:75], b, softcap=9.0), together)


def test_extreme_logits(emulation: Emulation) -> None:
    x = torch.tensor([[1e4], [-1e4], [0.0], [1.0], [torch.nan]])
    w, b = torch.tensor([[1.0], [-1.0], [1.0]]), torch.tensor([0.0, 0.0, -torch.inf])
    got = calls.stream(emulation, x, w, b)
    assert torch.allclose(got, torch.tensor([1e4, 1e4, math.log(2), math.log(2 * math.cosh(1)), torch.nan]),
                          equal_nan=True)  # fmt: skip
    assert calls.stream(emulation, torch.ones(1, 1), torch.ones(2, 1), torch.full((2,), -torch.inf))[0] == -torch.inf
    starts = torch.tensor([0, 3, 6, 9, 12, 15]).int()
    got = calls.labels(emulation, x, w, b, torch.arange(3).repeat(5), starts, torch.ones(5)).view(5, 3)
    assert got[:3].tolist() == [[1, 0, 0], [0, 1, 0], [0.5, 0.5, 0]]
    assert got[4].isnan().all()


def test_label_outside_the_matrix_answers_nan_and_reads_nothing(emulation: Emulation) -> None:
    x, w, _ = problem(2, 9, 8, torch.float32)
    ids, starts = torch.tensor([1, 9, -1, 3]), torch.tensor([0, 3, 4]).int()
    assert calls.labels(emulation, x, w, None, ids, starts).isnan().tolist() == [False, True, True, False]
    temperature = torch.tensor([1.0, 0.0])
    assert calls.labels(emulation, x, w, None, ids, starts, temperature).isnan().all()


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_large_logits_keep_their_fractions(emulation: Emulation, sign: float) -> None:
    # Every product and sum is exact in float32, so all that differs from the CPU's answer is rounding of the answer.
    x, w = torch.tensor([[sign * 1e4], [sign * 8192.0]]), torch.ones(333, 1)
    b = torch.randint(0, 64, (333,)) / 8.0
    b[5] = 8.0  # among the likeliest
    tokens = torch.tensor([5, 300])
    ids, starts = torch.tensor([5, 7, 300, 332, 1]), torch.tensor([0, 3, 5]).int()
    got = calls.stream(emulation, x, w, b, tokens)
    assert (got - scores.token_logprobs(x, w, b, tokens)).abs().max() < 1e-6
    assert (got - reference.token_logprobs(x, w, b, tokens)).abs().max() < 1e-6
    got = calls.stream(emulation, x, w, b, ids, starts)
    assert (got - scores.label_probabilities(x, w, b, ids, starts)).abs().max() < 1e-6
    assert (got - reference.label_probabilities(x, w, b, ids, starts)).abs().max() < 1e-6


def test_logprobs_are_never_above_zero(emulation: Emulation) -> None:
    # The label's logit and the maximum sum the same products in two orders, and one label holds all the weight.
    x = torch.randn(64, 512)
    w = torch.cat([x, torch.zeros(1, 512)]) * 20
    tokens = torch.arange(64)
    assert calls.stream(emulation, x, w, None, tokens).max() <= 0.0
    assert calls.stream(emulation, x, w, None, tokens, torch.arange(65).int()).max() <= 1.0


@pytest.mark.parametrize("temperature", [1e-38, 1e-45, 1e-4])
def test_tiny_temperatures_are_one_hot(emulation: Emulation, temperature: float) -> None:
    x, w = torch.tensor([[1e4], [-1e4], [3.0]]), torch.tensor([[1.0], [-1.0], [1.5], [-2.0]])
    starts, heat = torch.tensor([0, 4, 8, 12]).int(), torch.full((3,), temperature)
    got = calls.labels(emulation, x, w, None, torch.arange(4).repeat(3), starts, heat).view(3, 4)
    assert got.tolist() == [[0, 0, 1, 0], [0, 0, 0, 1], [0, 0, 1, 0]]
    wide = torch.tensor([[3e38], [-3e38], [0.0]])
    got = calls.labels(emulation, wide, w[:2], None, torch.tensor([0, 1] * 3), starts // 2, torch.full((3,), 3e38))
    want = torch.tensor([1 / (1 + math.exp(-2)), 1 / (1 + math.exp(2)), 0.5])
    assert torch.allclose(got.view(3, 2)[:, 0], want, atol=1e-6)
    heat[:] = torch.inf  # the launchers cannot see it; the CPU refuses it
    assert calls.labels(emulation, x, w, None, torch.arange(4).repeat(3), starts, heat).isnan().all()
