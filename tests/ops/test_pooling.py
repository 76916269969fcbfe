"""pool against its float64 twin, mixed kinds in one batch."""

from __future__ import annotations

import pytest
import torch

from pyruntime.ops import pooling, reference


def batch(lengths: list[int], width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    count = len(lengths)
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    kinds = (torch.arange(count) % 3).int()
    dimensions = torch.tensor([max(1, width - (i % 4) * width // 5) for i in range(count)]).int()
    return starts, kinds, dimensions, torch.arange(count) % 2 == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 7, 16, 64, 100, 384, 768, 1000, 4096])
def test_matches_reference(width: int, dtype: torch.dtype) -> None:
    lengths = [1, 2, 3, 1, 17, 256, 5, 31, 9, 64, 12, 40]
    arguments = batch(lengths, width)
    hidden = torch.randn(sum(lengths), width).to(dtype)
    got = pooling.pool(hidden, *arguments)
    assert got.dtype == torch.float32
    assert (got.double() - reference.pool(hidden, *arguments)).abs().max() < 1e-6


@pytest.mark.parametrize("lengths", [[70_000], [1] * 300, [20_000, 1, 50_000 - 1]], ids=["one", "short", "mixed"])
def test_sizes_from_one_row_to_many(lengths: list[int]) -> None:
    """Few long sequences are cut into columns among the threads, many are not."""
    arguments = batch(lengths, 48)
    arguments[1][:] = 2
    hidden = torch.randn(sum(lengths), 48).bfloat16()
    got = pooling.pool(hidden, *arguments)
    assert (got.double() - reference.pool(hidden, *arguments)).abs().max() < 1e-6
    torch.set_num_threads(1)
    assert torch.equal(pooling.pool(hidden, *arguments), got)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_mean_of_a_long_sequence_is_as_exact_as_float32(dtype: torch.dtype) -> None:
    length, width = 70_000, 280  # wide and single vectors of columns, and a rest
    hidden = (torch.randn(length + 5, width) + torch.linspace(-9, 9, width)).to(dtype)
    hidden[:, ::7] = torch.linspace(0.1, 3.3, width)[::7].to(dtype)  # constant: every rounding goes the same way
    hidden[-6, 1] = torch.inf
    kinds, dimensions = torch.full((2,), 2).int(), torch.full((2,), width).int()
    arguments = (torch.tensor([0, 5, length + 5]).int(), kinds, dimensions, torch.zeros(2, dtype=torch.bool))
    got, want = pooling.pool(hidden, *arguments).double(), reference.pool(hidden, *arguments)
    assert got[1, 1] == torch.inf
    got[1, 1] = want[1, 1] = 0
    # Columns whose mean is near 0 lose digits by cancellation in any arithmetic.
    assert ((got - want).abs() <= 1e-6 * want.abs().clamp(min=0.5)).all()


@pytest.mark.parametrize("size", [1e-10, 1.0, 1e20, 3e38])
def test_normalised_vectors_of_any_magnitude_have_length_one(size: float) -> None:
    hidden = (torch.rand(3, 100, dtype=torch.float64) * size).float()
    starts, kinds, dimensions, _ = batch([1, 1, 1], 100)
    got = pooling.pool(hidden, starts, kinds, dimensions, torch.ones(3, dtype=torch.bool)).double()
    for row, width in enumerate(dimensions.tolist()):
        want = hidden[row, :width].double()
        assert (got[row, :width] - want / want.norm()).abs().max() < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_given_rows_beside_the_other_kinds(dtype: torch.dtype) -> None:
    starts, kinds, dimensions, normalize = batch([5, 1, 9, 4, 7, 3, 2], 300)
    kinds = (torch.arange(7) % 4).int()
    rows = torch.tensor([99, -5, 0, 16, 0, 0, 0])
    hidden = torch.randn(31, 300).to(dtype)
    arguments = (hidden, starts, kinds, dimensions, normalize, rows)
    assert (pooling.pool(*arguments).double() - reference.pool(*arguments)).abs().max() < 1e-6


def test_strided_rows_and_zero_vector() -> None:
    wide = torch.randn(10, 50)
    arguments = batch([4, 6], 20)
    assert torch.equal(pooling.pool(wide[:, 10:30], *arguments), pooling.pool(wide[:, 10:30].contiguous(), *arguments))
    assert not pooling.pool(torch.zeros(10, 20), *arguments).any()


def test_row_is_bit_identical_alone_and_in_a_batch() -> None:
    lengths = [3, 40, 7, 1, 19, 300]
    hidden = torch.randn(sum(lengths), 384).bfloat16()
    starts, kinds, dimensions, normalize = batch(lengths, 384)
    together = pooling.pool(hidden, starts, kinds, dimensions, normalize)
    for i, length in enumerate(lengths):
        own = slice(int(starts[i]), int(starts[i + 1]))
        bounds = torch.tensor([0, length]).int()
        alone = pooling.pool(hidden[own], bounds, kinds[i : i + 1], dimensions[i : i + 1], normalize[i : i + 1])
        assert torch.equal(alone[0], together[i])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"starts": torch.tensor([0, 0, 4]).int()}, "sequence 0 has no rows"),
        ({"starts": torch.tensor([1, 2, 4]).int()}, "must begin with 0"),
        ({"kinds": torch.tensor([0, 4]).int()}, "kinds: entry 1 is 4"),
        ({"kinds": torch.tensor([-1, 0]).int()}, "kinds: entry 0 is -1"),
        ({"kinds": torch.tensor([0, 3]).int()}, "rows: needed"),
        ({"kinds": torch.tensor([0, 3]).int(), "rows": torch.tensor([0, 1])}, "rows: entry 1 is 1, outside"),
        ({"kinds": torch.tensor([3, 0]).int(), "rows": torch.tensor([-1, 0])}, "rows: entry 0 is -1, outside"),
        ({"rows": torch.tensor([0, 1]).int()}, "rows: expected dtype"),
        ({"dimensions": torch.tensor([0, 8]).int()}, "dimensions: entry 0"),
        ({"dimensions": torch.tensor([8, 9]).int()}, "dimensions: entry 1"),
        ({"normalize": torch.tensor([1, 0])}, "normalize: expected dtype"),
        ({"hidden": torch.randn(4)}, "hidden: expected shape"),
        ({"hidden": torch.randn(8, 4).T}, "last dimension"),
    ],
)
def test_bad_input_raises(change: dict, message: str) -> None:
    starts, kinds, dimensions, normalize = batch([2, 2], 8)
    arguments = {"hidden": torch.randn(4, 8), "starts": starts, "kinds": kinds, "dimensions": dimensions}
    with pytest.raises(RuntimeError, match=message):
        pooling.pool(**{**arguments, "normalize": normalize, **change})
