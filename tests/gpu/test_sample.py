"""Draws on the device: those of the CPU bit for bit, within a graph, and with frequencies of the distribution."""

from __future__ import annotations

import pytest
import torch

from pyruntime.ops import reference, sampling
from tests.emulation.test_sample import extras, parameters
from tests.gpu.test_kernels import on_device

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(257, 2), (257, 99), (64, 32_000), (64, 262_144), (1, 262_144)])
def test_draws_are_those_of_the_cpu_bit_for_bit(rows: int, columns: int, dtype: torch.dtype) -> None:
    logits = (torch.randn(rows, columns) * 3).to(dtype)
    own, more, top = parameters(rows), extras(rows, columns), min(columns, 20)
    assert torch.equal(sampling.sample(*on_device(logits, *own)).cpu(), sampling.sample(logits, *own))
    device = {name: value.cuda() for name, value in more.items()}
    got = sampling.sample_with_logprobs(*on_device(logits, *own), top=top, **device)
    want = sampling.sample_with_logprobs(logits, *own, top=top, **more)
    assert torch.equal(got[0].cpu(), want[0]) and torch.equal(got[2].cpu(), want[2])
    for a, b in ((got[1], want[1]), (got[3], want[3])):
        assert torch.allclose(a.cpu(), b, atol=1e-6, rtol=0, equal_nan=True)


def test_frequencies_match_the_filtered_distribution() -> None:
    logits, draws = torch.randn(1000) * 3, 100_000
    for options in ((1.0, 0, 1.0, 0.0), (0.7, 50, 0.9, 0.0), (1.3, 0, 0.8, 0.05)):
        expected = reference.filtered_distribution(logits, *options) * draws
        got = sampling.sample(
            logits.cuda().expand(draws, -1),
            torch.full((draws,), options[0]).cuda(),
            torch.full((draws,), options[1]).int().cuda(),
            torch.full((draws,), options[2]).cuda(),
            torch.full((draws,), options[3]).cuda(),
            torch.full((draws,), 7).cuda(),
            torch.arange(draws).cuda(),
            torch.zeros(draws).int().cuda(),
        )
        counts = torch.bincount(got.cpu(), minlength=1000).double()
        assert counts[expected == 0].sum() == 0
        common = expected > 5
        freedom = max(1, int(common.sum()))
        statistic = ((counts - expected) ** 2 / expected.clamp(min=1))[common].sum().item()
        # The 1 - 1e-6 quantile of chi-square, by the Wilson-Hilferty approximation.
        assert statistic <= freedom * (1 - 2 / (9 * freedom) + 4.7534 * (2 / (9 * freedom)) ** 0.5) ** 3
