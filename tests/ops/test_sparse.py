"""SPLADE maxima, lexical weights and delimiter rows against their twins."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from pyruntime.ops import pooling, reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def starts_of(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "vocabulary"), [(1, 2), (7, 99), (64, 1000), (384, 3001)])
def test_splade_matches_reference(width: int, vocabulary: int, dtype: torch.dtype) -> None:
    starts = starts_of([1, 2, 5, 3, 30])
    hidden = torch.randn(41, width).to(dtype)
    weight = (torch.randn(vocabulary, width) / math.sqrt(width)).to(dtype)
    for bias in (None, torch.randn(vocabulary).to(dtype) - 2):
        want = reference.pool_sparse(hidden, starts, weight, bias)
        for i, (ids, weights) in enumerate(pooling.pool_sparse(hidden, starts, weight, bias)):
            dense = torch.zeros(vocabulary, dtype=torch.float64)
            dense[ids] = weights.double()
            assert weights.dtype == torch.float32 and (weights > 0).all()
            assert (dense - want[i]).abs().max() < 1e-5


def test_splade_sequence_is_bit_identical_alone_and_nan_stays_in_it() -> None:
    lengths = [3, 14, 1, 6]
    starts, weight = starts_of(lengths), torch.randn(500, 96).bfloat16()
    hidden = torch.randn(24, 96).bfloat16()
    together = pooling.pool_sparse(hidden, starts, weight)
    torch.set_num_threads(1)
    for i, (a, b) in enumerate(pairwise(starts.tolist())):
        alone = pooling.pool_sparse(hidden[a:b], starts_of([b - a]), weight)[0]
        assert all(torch.equal(x, y) for x, y in zip(alone, together[i], strict=True))
    hidden[5] = torch.nan
    marked = pooling.pool_sparse(hidden, starts, weight)
    assert marked[1][1].isnan().all() and torch.equal(marked[0][1], together[0][1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 7, 384])
def test_lexical_weights_match_reference(width: int, dtype: torch.dtype) -> None:
    lengths = [1, 40, 3, 17]
    starts, total = starts_of(lengths), sum(lengths)
    hidden, weight = torch.randn(total, width).to(dtype), (torch.randn(width) / math.sqrt(width)).to(dtype)
    token_ids, skip = torch.randint(0, 12, (total,)), torch.tensor([7, 0])
    want = reference.lexical_weights(hidden, starts, token_ids, weight, 0.25, skip)
    ids, weights, bounds = pooling.lexical_weights(hidden, starts, token_ids, weight, 0.25, skip)
    assert ids.shape == weights.shape == (int(bounds[-1]),)
    for sequence, (a, b) in zip(want, pairwise(bounds.tolist()), strict=True):
        assert ids[a:b].tolist() == list(sequence)
        assert weights[a:b].tolist() == pytest.approx(list(sequence.values()), abs=1e-5)


def test_delimiter_rows_match_reference() -> None:
    starts = starts_of([9, 4, 1, 0, 3, 6])
    token_ids = torch.tensor([1, 9, 2, 9, 9, 3, 4, 9, 5, 9, 1, 2, 3, 9, 1, 2, 3, 9, 9, 9, 2, 9, 9])
    want = reference.delimiter_rows(token_ids, starts, 9)
    assert want == [[2, 3, 6], [], [], [], [], [17, 18, 20, 21]]
    rows, bounds = pooling.delimiter_rows(token_ids, starts, 9)
    assert [rows[a:b].tolist() for a, b in pairwise(bounds.tolist())] == want
    for length in (1, 1000, 70_000):
        token_ids = torch.randint(0, 5, (length,))
        rows, bounds = pooling.delimiter_rows(token_ids, starts_of([length]), 3)
        assert rows.tolist() == reference.delimiter_rows(token_ids, starts_of([length]), 3)[0]


def test_bad_input_raises() -> None:
    hidden, starts, weight = torch.randn(4, 8), starts_of([1, 3]), torch.randn(9, 8)
    with pytest.raises(RuntimeError, match="weight: expected shape"):
        pooling.pool_sparse(hidden, starts, weight[:, :7])
    with pytest.raises(RuntimeError, match="sequence 1 has no rows"):
        pooling.pool_sparse(hidden, starts_of([4, 0]), weight)
    with pytest.raises(RuntimeError, match="bias: expected shape"):
        pooling.pool_sparse(hidden, starts, weight, torch.randn(8))
    ids, skip = torch.arange(4), torch.tensor([0])
    for change, message in (
        ({"token_ids": torch.tensor([0, 1, -2, 3])}, "token_ids: entry 2 is negative"),
        ({"token_ids": ids[:3]}, "token_ids: expected shape"),
        ({"weight": weight[0, :7]}, "weight: expected shape"),
        ({"weight": weight[0].half()}, "weight: expected the dtype"),
        ({"skip": skip.int()}, "skip: expected dtype"),
    ):
        arguments = {"hidden": hidden, "starts": starts, "token_ids": ids, "weight": weight[0], "bias": 0.0}
        with pytest.raises(RuntimeError, match=message):
            pooling.lexical_weights(**{**arguments, "skip": skip, **change})
    with pytest.raises(RuntimeError, match="must end with"):
        pooling.delimiter_rows(ids, starts_of([3]), 1)
    with pytest.raises(RuntimeError, match="input_ids: expected dtype"):
        pooling.delimiter_rows(ids.int(), starts_of([4]), 1)
