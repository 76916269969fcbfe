"""Hidden rows of packed sequences to one vector each."""

from __future__ import annotations

import torch

from pyruntime.ops import _library  # noqa: F401  registers the ops


def pool(
    hidden: torch.Tensor,
    starts: torch.Tensor,
    kinds: torch.Tensor,
    dimensions: torch.Tensor,
    normalize: torch.Tensor,
) -> torch.Tensor:
    """hidden ``[T, H]`` → float32 ``[S, H]``; row i is its vector in the first ``dimensions[i]`` entries, zeros after.

    starts int32 ``[S+1]`` (no empty sequence), kinds int32 ``[S]`` (0 last row, 1 first row, 2 mean of rows, summed in
    float32), dimensions int32 ``[S]`` in 1..H, normalize bool ``[S]``: after the cut, divided by max(L2 norm, 1e-12),
    so a zero vector stays zero. hidden is float32, bfloat16 or float16. Bad arguments raise ``RuntimeError``.
    """
    out: torch.Tensor = torch.ops.pyruntime.pool(hidden, starts, kinds, dimensions, normalize)
    return out
