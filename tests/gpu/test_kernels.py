"""Every kernel on the device against its float64 twin, at the sizes that serving meets."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from pyruntime.ops import pooling, reference, scores
from tests.emulation.test_pool import batch
from tests.emulation.test_scores import problem, some_labels
from tests.emulation.test_sparse import starts_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = 1e-5  # of sums of at most 4096 products of unit scale in float32


def on_device(*values: object) -> list:
    return [v.cuda() if isinstance(v, torch.Tensor) else v for v in values]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 7, 64, 384, 768, 1000, 4096])
def test_pool(width: int, dtype: torch.dtype) -> None:
    arguments = batch([1, 3, 70, 2, 1, 1, 519, 5], width)
    hidden = torch.randn(int(arguments[0][-1]), width).to(dtype)
    got = pooling.pool(*on_device(hidden, *arguments)).cpu()
    assert (got - reference.pool(hidden, *arguments)).abs().max() < 1e-6
    wide = torch.full((hidden.shape[0], width + 3), torch.nan).to(dtype)
    wide[:, 1 : width + 1] = hidden
    strided = wide.cuda()[:, 1 : width + 1]
    assert torch.equal(pooling.pool(strided, *on_device(*arguments)).cpu(), got)


def test_pool_of_many_and_of_long_sequences() -> None:
    for lengths in ([64] * 1000 + [6000], [69_990, 10]):
        arguments = batch(lengths, 384)
        hidden = torch.randn(sum(lengths), 384).bfloat16()
        got = pooling.pool(*on_device(hidden, *arguments)).cpu()
        assert (got - reference.pool(hidden, *arguments)).abs().max() < 1e-6
        starts, *own, rows = arguments
        for i in (0, len(lengths) - 1):
            a, b = int(starts[i]), int(starts[i + 1])
            alone = on_device(hidden[a:b], torch.tensor([0, b - a]).int(), *(t[i : i + 1] for t in own))
            assert torch.equal(pooling.pool(*alone, (rows[i : i + 1] - a).cuda()).cpu()[0], got[i])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2, 1), (3, 99, 7), (70, 333, 33), (20, 65, 1000), (64, 32_000, 64)], ids=str)
def test_scores(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    x, w, b = problem(*shape, dtype)
    ids, starts = some_labels(*shape[:2], most=100)
    tokens, temperature = torch.randint(0, shape[1], (shape[0],)), torch.rand(shape[0]) + 0.3
    for bias, softcap, scale in ((None, 0.0, 1.0), (b, 5.0, 0.7)):
        shaping = {"softcap": softcap, "scale": scale}
        matrices = on_device(x, w, bias)
        lists = on_device(ids, starts)
        answers = [
            (scores.label_logits(*matrices, *lists), reference.label_logits(x, w, bias, ids, starts)),
            (
                scores.label_scores(*matrices, *lists, temperature.cuda(), **shaping),
                reference.label_scores(x, w, bias, ids, starts, temperature, **shaping),
            ),
            (scores.logsumexp(*matrices, **shaping), reference.logsumexp(x, w, bias, **shaping)),
            (
                scores.label_probabilities(*matrices, *lists, **shaping),
                reference.label_probabilities(x, w, bias, ids, starts, **shaping),
            ),
            (
                scores.token_logprobs(*matrices, tokens.cuda(), **shaping),
                reference.token_logprobs(x, w, bias, tokens, **shaping),
            ),
        ]
        for got, want in answers:
            assert (got.cpu() - want).abs().max() < TOLERANCE


def test_stream_at_real_width_never_holds_the_matrix() -> None:
    x, w, _ = problem(64, 262_144, 640, torch.bfloat16)
    x, w = x.cuda(), w.cuda()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    got = scores.logsumexp(x, w)
    assert torch.cuda.max_memory_allocated() - before < 64 * 262_144 * 4 / 10
    want = torch.logsumexp(x.double() @ w.double().T, -1)
    assert (got - want).abs().max() < TOLERANCE
    # Seventeen rows take the tall tile, one row the low one.
    assert torch.equal(scores.logsumexp(x[:17], w), got[:17])
    assert torch.equal(scores.logsumexp(x[5:6], w), got[5:6])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("lengths", "columns", "width"), [([1], 2, 1), ([3, 1, 17], 99, 7), ([70, 1, 500], 3001, 384)])
def test_sparse(lengths: list[int], columns: int, width: int, dtype: torch.dtype) -> None:
    starts, count = starts_of(lengths), sum(lengths)
    hidden = torch.randn(count, width).to(dtype)
    weight, bias = (torch.randn(columns, width) / math.sqrt(width)).to(dtype), torch.randn(columns).to(dtype)
    got = torch.ops.pyruntime.pool_sparse(*on_device(hidden, starts, weight, bias)).cpu()
    assert (got - reference.pool_sparse(hidden, starts, weight, bias)).abs().max() < TOLERANCE
    token_ids, skip = torch.randint(0, 30, (count,)), torch.tensor([0, 2, 29])
    want = reference.lexical_weights(hidden, starts, token_ids, weight[0], 0.1, skip)
    device = on_device(hidden, starts, token_ids, weight[0], 0.1, skip)
    ids, weights, bounds = (t.cpu() for t in pooling.lexical_weights(*device))
    for (a, b), expected in zip(pairwise(bounds.tolist()), want, strict=True):
        assert ids[a:b].tolist() == list(expected)
        assert weights[a:b].tolist() == pytest.approx(list(expected.values()), abs=TOLERANCE)


@pytest.mark.parametrize("lengths", [[1], [5, 1, 300], [0, 7000, 0, 3], [2] * 600], ids=str)
def test_delimiter_rows(lengths: list[int]) -> None:
    starts, input_ids = starts_of(lengths), torch.randint(0, 3, (sum(lengths),))
    rows, bounds = pooling.delimiter_rows(*on_device(input_ids, starts), 1)
    got = [rows[a:b].tolist() for a, b in pairwise(bounds.tolist())]
    assert got == reference.delimiter_rows(input_ids, starts, 1)
