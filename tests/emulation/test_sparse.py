"""The CUDA kernels of sparse embeddings and delimiters against their twins."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from pyruntime.ops import reference
from tests.emulation import calls
from tests.emulation.harness import RANDOM, REVERSE, Emulation

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def starts_of(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("lengths", "columns", "width"), [([1], 2, 1), ([3, 1, 17], 99, 7), ([70, 1, 130], 65, 40)])
def test_pool_sparse(emulation: Emulation, lengths: list[int], columns: int, width: int, dtype: torch.dtype) -> None:
    starts = starts_of(lengths)
    hidden = torch.randn(sum(lengths), width).to(dtype)
    weight, bias = (torch.randn(columns, width) / math.sqrt(width)).to(dtype), torch.randn(columns).to(dtype)
    for b in (None, bias):
        got = calls.pool_sparse(emulation, hidden, starts, weight, b)
        assert (got - reference.pool_sparse(hidden, starts, weight, b)).abs().max() < 5e-6
        assert torch.equal(calls.pool_sparse(emulation, hidden, starts, weight, b, tile_rows=64), got)
    alone = calls.pool_sparse(emulation, hidden[: lengths[0]].clone(), starts[:2].clone(), weight, bias)
    assert torch.equal(alone[0], got[0])


def test_pool_sparse_carries_nan(emulation: Emulation) -> None:
    hidden = torch.randn(6, 5)
    hidden[1, 2] = torch.nan
    got = calls.pool_sparse(emulation, hidden, starts_of([3, 3]), torch.randn(70, 5))
    assert got[0].isnan().all() and not got[1].isnan().any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("lengths", "width"), [([1], 1), ([3, 1, 40], 7), ([300, 2, 5], 384), ([1] * 300, 16)])
def test_lexical_weights(emulation: Emulation, lengths: list[int], width: int, dtype: torch.dtype) -> None:
    starts, count = starts_of(lengths), sum(lengths)
    hidden, weight = torch.randn(count, width).to(dtype), (torch.randn(width) / math.sqrt(width)).to(dtype)
    token_ids, skip = torch.randint(0, 30, (count,)), torch.tensor([0, 2, 29])
    want = reference.lexical_weights(hidden, starts, token_ids, weight, 0.1, skip)
    first = None
    for order in (0, REVERSE, RANDOM):
        emulation.order = order
        ids, weights, bounds = calls.lexical_weights(emulation, hidden, starts, token_ids, weight, 0.1, skip)
        for (a, b), expected in zip(pairwise(bounds.tolist()), want, strict=True):
            assert ids[a:b].tolist() == list(expected)
            assert weights[a:b].tolist() == pytest.approx(list(expected.values()), abs=5e-6)
        assert (ids[bounds[-1] :] == -1).all() and (weights[bounds[-1] :] == 0).all()
        first = weights if first is None else first
        assert torch.equal(weights, first)


@pytest.mark.parametrize("lengths", [[1], [5, 1, 300], [1000], [0, 700, 0, 3], [2] * 600, []], ids=str)
def test_delimiter_rows(emulation: Emulation, lengths: list[int]) -> None:
    starts = starts_of(lengths)
    input_ids = torch.randint(0, 3, (sum(lengths),))
    rows, bounds = calls.delimiter_rows(emulation, input_ids, starts, 1)
    got = [rows[a:b].tolist() for a, b in pairwise(bounds.tolist())]
    assert got == reference.delimiter_rows(input_ids, starts, 1)
    assert (rows[bounds[-1] :] == -1).all()
