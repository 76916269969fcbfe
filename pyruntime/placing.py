"""Arrays made on the host to where a model runs."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

import numpy as np
import torch

# Bytes at whose multiples each array begins in the common copy: those of the widest load of a kernel.
ALIGNMENT = 16


def place(arrays: Mapping[str, np.ndarray], device: str | torch.device) -> dict[str, torch.Tensor]:
    """Tensors of the arrays' dtypes and shapes on ``device``: in one copy, for which the host does not wait, however
    many they are. On a CPU the tensors are the arrays' memory."""
    kind = torch.device(device).type
    if kind == "cpu":
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
    # torch keeps pinned memory that is let go of until the copies out of it are done.
    return placed_together(arrays, device, is_pinned=kind == "cuda")


def placed_together(
    arrays: Mapping[str, np.ndarray], device: str | torch.device, *, is_pinned: bool
) -> dict[str, torch.Tensor]:
    """As ``place``, on any device: views of one tensor of bytes, each dense."""
    starts = [0, *accumulate(-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays.values())]
    host = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=is_pinned)
    places = dict(zip(arrays, starts, strict=False))
    _fill(host.numpy(), arrays, places)
    whole = host.to(device, non_blocking=True)
    return {
        name: whole[places[name] : places[name] + array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
        for name, array in arrays.items()
    }


def _fill(memory: np.ndarray, arrays: Mapping[str, np.ndarray], places: Mapping[str, int]) -> None:
    for name, array in arrays.items():
        begin = places[name]
        memory[begin : begin + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
