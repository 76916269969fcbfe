"""Weights that are laid on huge pages keep what they are."""

from __future__ import annotations

import gc

import pytest
import torch

from pyruntime.model import memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_copies_are_equal_aligned_and_outlive_each_other(dtype: torch.dtype) -> None:
    shapes = [(1001, 3001), (7, 9), (2, 3, 1000, 1000)]
    tensors = [(torch.rand(shape) * 200).to(dtype) for shape in shapes]
    tensors[0] = tensors[0].T  # not contiguous
    large = sum(each.nbytes for each in tensors) >= memory.LEAST_BYTES
    copies = memory.on_huge_pages(tensors)
    assert all(torch.equal(*pair) for pair in zip(copies, tensors, strict=True))
    assert large and all(copy is not each and copy.is_contiguous() for copy, each in zip(copies, tensors, strict=True))
    assert copies[0].data_ptr() % memory.HUGE_PAGE == 0 and all(each.data_ptr() % 64 == 0 for each in copies)
    kept = copies[1]
    del copies
    gc.collect()
    assert torch.equal(kept, tensors[1])


def test_small_tensors_stay_where_they_are() -> None:
    tensors = [torch.ones(1000), torch.ones(5)]
    assert memory.on_huge_pages(tensors) is tensors
    meta = [torch.empty(memory.LEAST_BYTES, device="meta")]
    assert memory.on_huge_pages(meta) is meta
