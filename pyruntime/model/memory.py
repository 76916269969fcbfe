"""Memory of the system: large tensors where few page tables lead to them, and what no tensor uses any more."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from itertools import accumulate

import torch

HUGE_PAGE = 2**21
# Below, pages that are not huge, at both ends, would be much of it.
LEAST_BYTES = 4 * HUGE_PAGE
LINE = 64


def on_huge_pages(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Contiguous copies, side by side in memory for which the system is asked for huge pages; the tensors themselves
    where they are few bytes, not on the CPU, or the system has no such pages.

    The kernel gives them where it has them and leaves the request aside elsewhere. Reading an output matrix takes a
    tenth less: the processor waits for an entry of the page table once a page, and reads ahead to its end only.
    """
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    starts = [0, *accumulate(-(-each.nbytes // LINE) * LINE for each in tensors)]
    if advice is None or starts[-1] < LEAST_BYTES or any(each.device.type != "cpu" for each in tensors):
        return tensors
    memory = mmap.mmap(-1, starts[-1] + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel that was built without them
        memory.madvise(advice)
    whole = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the mapping as long as a tensor reads it
    begin = -whole.data_ptr() % HUGE_PAGE
    parts = zip(tensors, (whole[begin + start :] for start in starts), strict=False)
    return [part[: each.nbytes].view(each.dtype).view(each.shape).copy_(each) for each, part in parts]


def release_memory() -> None:
    """Of the allocators of torch and of the C library, both of which keep what was freed for later."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    with contextlib.suppress(OSError, AttributeError):  # a C library other than GNU's
        ctypes.CDLL(None).malloc_trim(0)
