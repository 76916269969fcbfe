"""Draws against the exact twin, in every dtype, batch and instruction set; frequencies."""

from __future__ import annotations

import pytest
import torch

from pyruntime.ops import reference, sampling
from tests.ops import exact_sampler
from tests.ops.exact_sampler import parameters
from tests.ops.instruction_sets import CAPABILITIES, run

OPTIONS = [
    (1.0, 0, 1.0, 0.0),
    (0.7, 50, 0.9, 0.0),
    (1.5, 0, 0.95, 0.0),
    (0.3, 0, 1.0, 0.05),
    (2.0, 7, 0.5, 0.1),
    (1e-3, 0, 0.999, 0.0),
    (100.0, 3000, 0.7, 0.9),
    (0.0, 0, 1.0, 0.0),
]


def shapes_of_logits(vocabulary: int) -> torch.Tensor:
    """Rows that differ in kind: spread, ties, all equal, extremes, one finite, a gap."""
    rows = torch.randn(9, vocabulary) * 3
    rows[1] = rows[1].round()
    rows[2] = 1.25
    rows[3] = rows[3].sign() * 1e4
    rows[4, : vocabulary // 2] = -torch.inf
    rows[5, 1:] = -torch.inf
    rows[6] = -1e4
    rows[7, vocabulary // 2] = 40.0
    rows[8] *= 1e-6
    return rows


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("vocabulary", [1, 2, 99, 128, 129, 5000])
def test_draws_equal_the_exact_twin(vocabulary: int, options: tuple) -> None:
    logits = shapes_of_logits(vocabulary)
    given = parameters(len(logits), options)
    got = sampling.sample(logits, *given).tolist()
    for row, values in enumerate(logits.numpy()):
        own = [g[row].item() for g in given]
        assert got[row] == exact_sampler.draw(values, *own), f"row {row}"


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_draws_equal_the_exact_twin_at_real_width(options: tuple) -> None:
    logits = torch.randn(1, 262_144) * 3
    given = parameters(1, options)
    want = exact_sampler.draw(logits[0].numpy(), *[g.item() for g in given])
    assert sampling.sample(logits, *given).item() == want


@pytest.mark.parametrize("kept", [1, 5, 200, 40_000])
def test_few_candidates_among_many_ids(kept: int) -> None:
    """All else is -inf, as under a grammar: also where fewer are left than top_k asks for."""
    logits = torch.full((4, 100_000), -torch.inf)
    for row in logits:
        row[torch.randperm(100_000)[:kept]] = torch.randn(kept) * 2
    for options in ((1.0, 150, 0.9, 0.0), (1.0, 0, 0.9, 0.0), (0.5, 390, 1.0, 0.0), (1.0, 20_000, 1.0, 0.2)):
        given = parameters(4, options)
        got = sampling.sample(logits, *given).tolist()
        for row, values in enumerate(logits.numpy()):
            finite = values > -float("inf")
            names = finite.nonzero()[0]
            # What is -inf is never drawn, so the twin need not sort it.
            assert got[row] == names[exact_sampler.draw(values[finite], *[g[row].item() for g in given])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 3, 64, 257])
def test_rows_are_the_same_alone_and_in_a_batch_in_every_dtype(rows: int, dtype: torch.dtype) -> None:
    logits = (torch.randn(rows, 999) * 3).to(dtype)
    given = parameters(rows, (0.8, 40, 0.9, 0.01))
    together = sampling.sample(logits, *given)
    assert torch.equal(together, sampling.sample(logits.float(), *given))
    strided = torch.zeros(rows, 1500, dtype=dtype)
    strided[:, 3:1002] = logits
    assert torch.equal(together, sampling.sample(strided[:, 3:1002], *given))
    torch.set_num_threads(1)
    for row in {0, rows // 2, rows - 1}:
        own = [g[row : row + 1] for g in given]
        assert sampling.sample(logits[row : row + 1], *own).item() == together[row]


def test_chi_square_of_a_hundred_thousand_draws() -> None:
    logits = torch.randn(300) * 2
    options = (0.9, 60, 0.92, 0.002)
    expected = reference.filtered_distribution(logits, *options) * 100_000
    counts = torch.zeros(300, dtype=torch.float64)
    for part in range(10):
        given = parameters(10_000, options)
        given[4][:], given[5][:] = 11, torch.arange(10_000) + 10_000 * part
        counts += torch.bincount(sampling.sample(logits.expand(10_000, -1), *given), minlength=300).double()
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    freedom = int(kept.sum()) - 1
    statistic = ((counts - expected)[kept] ** 2 / expected[kept]).sum().item()
    # The 1 - 1e-6 quantile by Wilson and Hilferty.
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 4.7534 * (2 / (9 * freedom)) ** 0.5) ** 3


def test_every_instruction_set_draws_the_same_bits() -> None:
    assert len({run(capability)[2] for capability in (*CAPABILITIES, "")}) == 1
