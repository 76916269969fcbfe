"""Draws: the allowed set, the frequencies, the counter, and independence of the batch."""

from __future__ import annotations

import pytest
import torch

from pyruntime.ops import reference, sampling

# The 1 - 1e-6 quantile of chi-square, by the Wilson-Hilferty approximation.
QUANTILE = 4.7534


def chi_square_limit(freedom: int) -> float:
    return freedom * (1 - 2 / (9 * freedom) + QUANTILE * (2 / (9 * freedom)) ** 0.5) ** 3


def draw(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float, *, seed: int = 7, index: int = 0
) -> torch.Tensor:
    """One draw a row of ``logits``, row i at position i."""
    count = logits.shape[0]
    return sampling.sample(
        logits,
        torch.full((count,), temperature),
        torch.full((count,), top_k, dtype=torch.int32),
        torch.full((count,), top_p),
        torch.full((count,), min_p),
        torch.full((count,), seed),
        torch.arange(count),
        torch.full((count,), index, dtype=torch.int32),
    )


FILTERS = [
    (1.0, 0, 1.0, 0.0),
    (0.7, 5, 1.0, 0.0),
    (1.3, 0, 0.8, 0.0),
    (1.0, 20, 0.9, 0.05),
    (2.0, -1, 1.0, 0.2),
    (1.0, 1, 1.0, 0.0),
    (0.0, 3, 0.5, 0.5),
]


@pytest.mark.parametrize("options", FILTERS, ids=str)
@pytest.mark.parametrize("vocabulary", [1, 2, 17, 99, 1000])
def test_frequencies_match_the_filtered_distribution(vocabulary: int, options: tuple) -> None:
    logits = torch.randn(vocabulary) * 3
    logits[vocabulary // 2 :: 7] = logits.max() - 1  # ties
    expected = reference.filtered_distribution(logits, *options) * 20_000
    counts = torch.bincount(draw(logits.expand(20_000, -1), *options), minlength=vocabulary).double()
    assert counts[expected == 0].sum() == 0
    common = expected > 5
    statistic = ((counts - expected) ** 2 / expected.clamp(min=1))[common].sum().item()
    assert statistic <= chi_square_limit(max(1, int(common.sum())))


def test_ties_are_taken_by_lower_id() -> None:
    logits = torch.zeros(4000, 10)
    assert draw(logits, 1.0, 3, 1.0, 0.0).unique().tolist() == [0, 1, 2]
    assert draw(logits, 1.0, 0, 0.45, 0.0).unique().tolist() == [0, 1, 2, 3, 4]
    assert draw(logits[:1], 0.0, 0, 1.0, 0.0).tolist() == [0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_is_argmax_at_real_width(dtype: torch.dtype) -> None:
    logits = (torch.randn(5, 262_144) * 4).to(dtype)
    want = [int((row == row.max()).nonzero()[0]) for row in logits]
    assert draw(logits, 0.0, 0, 1.0, 0.0).tolist() == want
    assert draw(logits, 1.0, 1, 1.0, 0.0).tolist() == want
    assert draw(logits, 1e-6, 0, 0.5, 0.0).tolist() == want


def test_allowed_set_at_real_width() -> None:
    logits = (torch.randn(262_144) * 2).expand(200, -1)
    for options in ((1.0, 50, 0.9, 0.0), (1.0, 0, 0.3, 0.0), (0.8, 0, 1.0, 0.3)):
        allowed = reference.filtered_distribution(logits[0], *options) > 0
        assert allowed[draw(logits, *options)].all()


def test_row_does_not_depend_on_neighbours_threads_or_stride() -> None:
    logits = torch.randn(33, 3001) * 2
    arguments = [
        torch.rand(33) + 0.5,
        torch.randint(0, 60, (33,)).int(),
        torch.rand(33) * 0.9 + 0.05,
        torch.rand(33) * 0.1,
        torch.randint(-(2**62), 2**62, (33,)),
        torch.randint(0, 5000, (33,)),
        torch.randint(0, 128, (33,)).int(),
    ]
    together = sampling.sample(logits, *arguments)
    torch.set_num_threads(1)
    for i in (0, 1, 16, 32):
        assert sampling.sample(logits[i : i + 1], *[a[i : i + 1] for a in arguments])[0] == together[i]
    wide = torch.randn(33, 4000)
    wide[:, :3001] = logits
    assert torch.equal(sampling.sample(wide[:, :3001], *arguments), together)


def test_draw_is_a_function_of_seed_position_and_index() -> None:
    logits = torch.zeros(64, 50_000)
    base = draw(logits, 1.0, 0, 1.0, 0.0)
    assert torch.equal(base, draw(logits, 1.0, 0, 1.0, 0.0))
    assert base.unique().numel() > 60
    for other in (draw(logits, 1.0, 0, 1.0, 0.0, seed=8), draw(logits, 1.0, 0, 1.0, 0.0, index=1)):
        assert (other == base).sum() < 3


def test_generator_is_philox() -> None:
    # Random123's known answer for a zero key and counter: 6627e8d5 e169c58d …; of 2^19 equal tokens the top 19 bits.
    logits = torch.zeros(1, 1 << 19)
    assert draw(logits, 1.0, 0, 1.0, 0.0, seed=0).item() == 0x6627E8D5 >> 13


def test_rows_without_an_answer_are_reported_alone() -> None:
    logits = torch.randn(6, 100)
    logits[1, 50] = torch.nan
    logits[2, 99] = torch.inf
    logits[3] = -torch.inf
    logits[4, 1:] = -torch.inf
    for temperature in (0.0, 1.0):
        got = draw(logits, temperature, 0, 1.0, 0.0).tolist()
        assert got[1:4] == [-1, -1, -1] and got[4] == 0 and got[0] >= 0 and got[5] >= 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((-1.0, 0, 1.0, 0.0), "temperature: entry 0"),
        ((float("nan"), 0, 1.0, 0.0), "temperature: entry 0"),
        ((1.0, 0, 0.0, 0.0), "top_p: entry 0"),
        ((1.0, 0, 1.1, 0.0), "top_p: entry 0"),
        ((1.0, 0, 1.0, 1.5), "min_p: entry 0"),
    ],
)
def test_bad_parameters_raise(options: tuple, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        draw(torch.randn(2, 5), *options)


def test_bad_shapes_raise() -> None:
    with pytest.raises(RuntimeError, match="logits: expected 1 to"):
        draw(torch.randn(2, 0), 1.0, 0, 1.0, 0.0)
    with pytest.raises(RuntimeError, match="logits: expected float32"):
        draw(torch.zeros(2, 5, dtype=torch.int64), 1.0, 0, 1.0, 0.0)
