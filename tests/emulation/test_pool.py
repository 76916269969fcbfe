"""The CUDA pooling kernel against its float64 twin."""

from __future__ import annotations

import pytest
import torch

from pyruntime.ops import reference
from tests.emulation import calls
from tests.emulation.harness import RANDOM, REVERSE, Emulation

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def batch(lengths: list[int], width: int) -> list[torch.Tensor]:
    count = len(lengths)
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    kinds = (torch.arange(count) % 4).int()
    rows = starts[:-1] + (torch.rand(count) * torch.tensor(lengths)).long()
    return [starts, kinds, torch.randint(1, width + 1, (count,)).int(), torch.rand(count) < 0.5, rows]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 7, 64, 384, 768, 1000, 4096])
def test_matches_reference(emulation: Emulation, width: int, dtype: torch.dtype) -> None:
    arguments = batch([1, 3, 70, 2, 1, 1, 19, 5], width)
    hidden = torch.randn(int(arguments[0][-1]), width).to(dtype)
    got = calls.pool(emulation, hidden, *arguments)
    assert (got - reference.pool(hidden, *arguments)).abs().max() < 1e-6


def test_long_sequence_and_strides(emulation: Emulation) -> None:
    arguments = batch([1, 3, 69_990, 6], 64)
    arguments[3][2] = False
    wide = torch.randn(70_000, 67)
    for hidden in (wide[:, :64], wide[:, 3:].contiguous(), wide[:, 1:65]):
        got = calls.pool(emulation, hidden, *arguments)
        assert (got - reference.pool(hidden, *arguments)).abs().max() < 1e-6


def test_sequence_does_not_depend_on_neighbours_or_order(emulation: Emulation) -> None:
    arguments = batch([5, 300, 4, 2, 9, 1, 40], 384)
    hidden = torch.randn(int(arguments[0][-1]), 384).bfloat16()
    together = calls.pool(emulation, hidden, *arguments)
    for order, seed in ((REVERSE, 0), (RANDOM, 1), (RANDOM, 2)):
        emulation.order, emulation.seed = order, seed
        assert torch.equal(calls.pool(emulation, hidden, *arguments), together)
    starts, *own, rows = arguments
    for i in range(7):
        a, b = int(starts[i]), int(starts[i + 1])
        alone = [torch.tensor([0, b - a]).int(), *(t[i : i + 1].clone() for t in own), rows[i : i + 1] - a]
        assert torch.equal(calls.pool(emulation, hidden[a:b].clone(), *alone)[0], together[i])


def test_zero_vector_stays_zero(emulation: Emulation) -> None:
    starts, kinds, dimensions, normalize, _ = batch([2, 2], 40)
    normalize[:] = True
    assert (calls.pool(emulation, torch.zeros(4, 40), starts, kinds, dimensions, normalize) == 0).all()


@pytest.mark.parametrize("size", [1e-10, 1e20, 1e30, 1e38])
def test_vectors_of_any_size_become_unit_vectors(emulation: Emulation, size: float) -> None:
    starts, kinds = torch.tensor([0, 2, 4]).int(), torch.tensor([0, 2]).int()
    hidden = (torch.rand(4, 700) * 0.5 + 0.5) * size
    hidden[:, 1::2] *= -1
    got = calls.pool(emulation, hidden, starts, kinds, torch.tensor([700, 9]).int(), torch.ones(2) > 0)
    assert (got.double().norm(dim=1) - 1).abs().max() < 1e-6
    want = torch.stack([hidden[1], hidden[2:].double().mean(0)]).double()
    want[1, 9:] = 0
    assert (got - want / want.norm(dim=1, keepdim=True)).abs().max() < 1e-6


def test_wrong_arguments_answer_nan_alone(emulation: Emulation) -> None:
    starts = torch.tensor([0, 2, 2, 4, 6, 8, 10, 99]).int()
    kinds = torch.tensor([2, 2, 7, 0, 3, 3, 0]).int()
    dimensions = torch.tensor([8, 8, 8, 9, 8, 8, 8]).int()
    rows = torch.tensor([0, 0, 0, 0, 5, 8, 0])
    got = calls.pool(emulation, torch.randn(10, 8), starts, kinds, dimensions, torch.zeros(7) > 0, rows)
    assert got.isnan().all(1).tolist() == [False, True, True, True, True, False, True]
    assert not got[[0, 5]].isnan().any()
