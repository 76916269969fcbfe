"""What is applied before the filters (penalties, bias, mask), logprobs, and refused arguments."""

from __future__ import annotations

import itertools

import pytest
import torch

from pyruntime.ops import reference, sampling
from tests.ops.exact_sampler import parameters


def lists(rows: list[dict[int, float]], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ragged (ids, values, starts), ids ascending."""
    rows = [dict(sorted(row.items())) for row in rows]
    ids = torch.tensor([i for row in rows for i in row], dtype=torch.int64)
    values = torch.tensor([v for row in rows for v in row.values()], dtype=dtype)
    return ids, values, torch.tensor([0, *[len(row) for row in rows]]).cumsum(0).int()


def packed_bits(allowed: torch.Tensor) -> torch.Tensor:
    width = -(-allowed.shape[1] // 32) * 32
    bits = torch.zeros(allowed.shape[0], width, dtype=torch.int64)
    bits[:, : allowed.shape[1]] = allowed
    words = (bits.view(allowed.shape[0], -1, 32) << torch.arange(32)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [2, 99, 4100])
def test_penalties_bias_and_mask_come_first_in_order(vocabulary: int, dtype: torch.dtype) -> None:
    rows = 12
    logits = (torch.randn(rows, vocabulary) * 2).to(dtype)
    some = [torch.randperm(vocabulary)[: i % 7].tolist() for i in range(rows)]
    seen = [{token: i % 3 for i, token in enumerate(tokens)} for tokens in some]
    bias = [{token: float(i) - 3.0 for i, token in enumerate(tokens[::2])} for tokens in some]
    bias[5] = {0: -torch.inf}
    allowed = torch.rand(rows, vocabulary) < 0.6
    allowed[:, 1] = True
    repetition, frequency, presence = torch.rand(rows) + 0.5, torch.rand(rows) - 0.3, torch.rand(rows) * 2 - 1
    seen_ids, seen_generated, seen_starts = lists(seen, torch.int32)
    bias_ids, bias_values, bias_starts = lists(bias, torch.float32)
    extras = {
        "repetition": repetition, "frequency": frequency, "presence": presence, "seen_ids": seen_ids,
        "seen_generated": seen_generated, "seen_starts": seen_starts, "bias_ids": bias_ids,
        "bias_values": bias_values, "bias_starts": bias_starts, "bitmask": packed_bits(allowed),
    }  # fmt: skip
    before = logits.clone()
    want = torch.stack(
        [
            reference.adjusted_logits(
                logits[r], seen=seen[r], repetition=repetition[r].item(), frequency=frequency[r].item(),
                presence=presence[r].item(), bias=bias[r], allowed=allowed[r],
            )
            for r in range(rows)
        ]
    )  # fmt: skip
    for options in ((0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.8, 3, 0.9, 0.0)):
        given = parameters(rows, options)
        got = sampling.sample(logits, *given, **extras)
        assert torch.equal(got, sampling.sample(want, *given))
        assert allowed[torch.arange(rows), got].all()
        with_logprobs = sampling.sample_with_logprobs(logits, *given, top=2, **extras)
        assert torch.equal(with_logprobs.ids, got)
        raw = torch.log_softmax(logits.double(), -1)
        assert (with_logprobs.logprobs - raw[torch.arange(rows), got]).abs().max() < 2e-6
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    ("vocabulary", "top"), [*itertools.product([20, 99, 32_000, 262_144], [0, 1, 5, 20]), (262_144, 1024)]
)
def test_logprobs_are_of_the_raw_distribution(vocabulary: int, top: int) -> None:
    logits = torch.randn(3, vocabulary) * 4
    logits[1] = logits[1].round()  # ties
    answer = sampling.sample_with_logprobs(logits, *parameters(3, (0.5, 5, 0.9, 0.0)), top=top)
    raw = torch.log_softmax(logits.double(), -1)
    assert (answer.logprobs - raw.gather(1, answer.ids[:, None])[:, 0]).abs().max() < 2e-6
    order = torch.sort(logits, descending=True, stable=True, dim=-1).indices[:, :top]
    assert torch.equal(answer.top_ids, order)
    assert torch.allclose(answer.top_logprobs.double(), raw.gather(1, order), atol=2e-6, rtol=0)


def test_rows_without_an_answer_are_reported_alone() -> None:
    logits = torch.randn(5, 70)
    logits[1, 60] = torch.nan
    logits[2, 3] = torch.inf
    allowed = torch.ones(5, 70, dtype=torch.bool)
    allowed[1, 60] = False  # a mask does not hide it
    allowed[3] = False
    answer = sampling.sample_with_logprobs(
        logits, *parameters(5, (1.0, 0, 0.9, 0.0)), top=2, bitmask=packed_bits(allowed)
    )
    assert (answer.ids == -1).tolist() == [False, True, True, True, False]
    assert answer.logprobs.isnan().tolist() == [False, True, True, True, False]
    assert answer.top_ids[3].tolist() == [-1, -1] and answer.top_logprobs[1].isnan().all()


GOOD_LISTS = {
    "seen_ids": torch.tensor([1, 4, 0]),
    "seen_generated": torch.tensor([1, 0, 2]).int(),
    "seen_starts": torch.tensor([0, 2, 3]).int(),
}


@pytest.mark.parametrize(
    ("extras", "message"),
    [
        ({**GOOD_LISTS, "seen_ids": torch.tensor([4, 1, 0])}, "expected ascending ids"),
        ({**GOOD_LISTS, "seen_ids": torch.tensor([1, 1, 0])}, "expected ascending ids"),
        ({**GOOD_LISTS, "seen_ids": torch.tensor([1, 9, 0])}, "seen_ids: entry 1 is 9, outside"),
        ({**GOOD_LISTS, "seen_ids": torch.tensor([-1, 4, 0])}, "seen_ids: entry 0 is -1, outside"),
        ({**GOOD_LISTS, "seen_generated": torch.tensor([1, -1, 0]).int()}, "seen_generated: entry 1"),
        ({**GOOD_LISTS, "seen_starts": torch.tensor([0, 3]).int()}, "seen_starts: expected shape"),
        ({"seen_ids": torch.tensor([1])}, "all of them or none"),
        ({"repetition": torch.tensor([1.0, 0.0])}, "repetition: entry 1"),
        ({"frequency": torch.tensor([1.0, torch.nan])}, "frequency: entry 1"),
        ({"presence": torch.ones(3)}, "presence: expected shape"),
        ({"bitmask": torch.zeros(2, 2).int()}, "bitmask: expected shape"),
        ({"bitmask": torch.zeros(2, 1)}, "bitmask: expected dtype"),
        (
            {
                "bias_ids": torch.tensor([2]),
                "bias_values": torch.tensor([torch.inf]),
                "bias_starts": torch.tensor([0, 1, 1]).int(),
            },
            "bias_values: entry 0",
        ),
    ],
)
def test_bad_extras_raise(extras: dict, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        sampling.sample(torch.randn(2, 9), *parameters(2, (1.0, 0, 1.0, 0.0)), **extras)


def test_bad_sizes_raise() -> None:
    with pytest.raises(RuntimeError, match="top_logprobs"):
        sampling.sample_with_logprobs(torch.randn(2, 9), *parameters(2, (1.0, 0, 1.0, 0.0)), top=10)
    with pytest.raises(RuntimeError, match="top_logprobs: expected -1 to 1024, got 1025"):
        sampling.sample_with_logprobs(torch.randn(2, 2000), *parameters(2, (1.0, 0, 1.0, 0.0)), top=1025)
    with pytest.raises(RuntimeError, match="columns"):
        sampling.sample(torch.empty(1, 1 << 20), *parameters(1, (1.0, 0, 1.0, 0.0)))
    with pytest.raises(RuntimeError, match="seeds: expected shape"):
        sampling.sample(
            torch.randn(3, 9), *parameters(3, (1.0, 0, 1.0, 0.0))[:4], *parameters(2, (1.0, 0, 1.0, 0.0))[4:]
        )
