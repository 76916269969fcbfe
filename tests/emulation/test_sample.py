"""The CUDA sampling kernel: the CPU op's draws bit for bit, and the filtered distribution's allowed set."""

from __future__ import annotations

import pytest
import torch

from pyruntime.ops import reference, sampling
from tests.emulation import calls
from tests.emulation.harness import RANDOM, REVERSE, Emulation

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def parameters(rows: int) -> list[torch.Tensor]:
    """Every filter on in some rows and off in others, greedy among them."""
    return [
        torch.rand(rows) * 2 * (torch.rand(rows) > 0.1),
        torch.randint(-1, 80, (rows,)).int() * (torch.rand(rows) > 0.3),
        torch.where(torch.rand(rows) > 0.3, torch.rand(rows) * 0.98 + 0.01, torch.ones(rows)),
        torch.where(torch.rand(rows) > 0.5, torch.rand(rows) * 0.3, torch.zeros(rows)),
        torch.randint(-(2**62), 2**62, (rows,)),
        torch.randint(0, 5000, (rows,)),
        torch.randint(0, 128, (rows,)).int(),
    ]


def ragged_ids(rows: int, columns: int, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    parts = [torch.randperm(columns)[: int(torch.randint(0, most + 1, ()))].sort().values for _ in range(rows)]
    return torch.cat(parts), torch.tensor([0, *map(len, parts)]).cumsum(0).int()


def extras(rows: int, columns: int) -> dict[str, torch.Tensor]:
    seen, seen_starts = ragged_ids(rows, columns, min(columns, 50))
    biased, bias_starts = ragged_ids(rows, columns, min(columns, 20))
    words = torch.randint(-(2**31), 2**31, (rows, -(-columns // 32))).int()
    return {
        "repetition": torch.rand(rows) + 0.5,
        "frequency": torch.randn(rows),
        "presence": torch.randn(rows),
        "seen_ids": seen,
        "seen_generated": torch.randint(0, 4, seen.shape).int(),
        "seen_starts": seen_starts,
        "bias_ids": biased,
        "bias_values": torch.randn(len(biased)) * 3,
        "bias_starts": bias_starts,
        "bitmask": words,
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(12, 2), (12, 99), (12, 1000), (4, 32_000), (3, 262_144)])
def test_draws_are_those_of_the_cpu_bit_for_bit(
    emulation: Emulation, rows: int, columns: int, dtype: torch.dtype
) -> None:
    logits = (torch.randn(rows, columns) * 3).to(dtype)
    logits[0] = 1.25
    own = parameters(rows)
    assert torch.equal(calls.sample(emulation, logits, *own)[0], sampling.sample(logits, *own))
    more, top = extras(rows, columns), min(columns, 20)
    got = calls.sample(emulation, logits, *own, top_logprobs=top, **more)
    want = sampling.sample_with_logprobs(logits, *own, top=top, **more)
    assert torch.equal(got[0], want[0]) and torch.equal(got[2], want[2])
    # The logarithm of the mass is the library's: it may round otherwise on a device.
    for a, b in ((got[1], want[1]), (got[3], want[3])):
        assert torch.allclose(a, b, atol=1e-6, rtol=0, equal_nan=True)


def test_allowed_set(emulation: Emulation) -> None:
    logits = torch.randn(500) * 2
    for options in ((1.0, 50, 0.9, 0.0), (1.0, 0, 0.3, 0.0), (0.8, 0, 1.0, 0.3), (0.0, 0, 1.0, 0.0)):
        allowed = reference.filtered_distribution(logits, *options) > 0
        own = [
            torch.full((40,), options[0]),
            torch.full((40,), options[1]).int(),
            torch.full((40,), options[2]),
            torch.full((40,), options[3]),
            torch.full((40,), 3),
            torch.arange(40),
            torch.zeros(40).int(),
        ]
        assert allowed[calls.sample(emulation, logits.expand(40, -1), *own)[0]].all()


def test_row_does_not_depend_on_batch_order_or_stride(emulation: Emulation) -> None:
    logits, own = torch.randn(9, 1500) * 2, parameters(9)
    together = calls.sample(emulation, logits, *own)[0]
    for order, seed in ((REVERSE, 0), (RANDOM, 1)):
        emulation.order, emulation.seed = order, seed
        assert torch.equal(calls.sample(emulation, logits, *own)[0], together)
    for i in (0, 8):
        alone = calls.sample(emulation, logits[i : i + 1].clone(), *(p[i : i + 1].clone() for p in own))
        assert alone[0] == together[i]
    wide = torch.full((9, 1503), torch.nan)
    wide[:, 1:1501] = logits
    assert torch.equal(calls.sample(emulation, wide[:, 1:1501], *own)[0], together)


def test_rows_without_an_answer_are_reported_alone(emulation: Emulation) -> None:
    logits = torch.randn(9, 100)
    logits[1, 50], logits[2, 99], logits[3] = torch.nan, torch.inf, -torch.inf
    logits[4, 1:] = -torch.inf
    own = parameters(9)
    own[0][5], own[2][6], own[3][7] = -1.0, torch.nan, 2.0
    mask = torch.full((9, 4), -1, dtype=torch.int32)
    mask[8] = 0
    ids, logprobs, top_ids, top_values = calls.sample(emulation, logits, *own, bitmask=mask, top_logprobs=3)
    bad = [1, 2, 3, 5, 6, 7, 8]
    assert (ids[bad] == -1).all() and logprobs[bad].isnan().all()
    assert (top_ids[bad] == -1).all() and top_values[bad].isnan().all()
    assert ids[0] >= 0 and ids[4] == 0 and logprobs[4] == 0


def test_ids_outside_the_vocabulary_spoil_their_row_alone(emulation: Emulation) -> None:
    own, starts = parameters(3), torch.tensor([0, 1, 2, 3]).int()
    ids = calls.sample(
        emulation, torch.randn(3, 50), *own, bias_ids=torch.tensor([4, 50, 7]), bias_values=torch.ones(3),
        bias_starts=starts,
    )[0]  # fmt: skip
    assert ids[1] == -1 and (ids[[0, 2]] >= 0).all()
