"""The linear for few rows."""

from __future__ import annotations

import torch

from pyruntime.ops import _library  # noqa: F401  registers the ops


def linear_rows(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ w.T + bias``: x ``[R, K]``, w ``[N, K]``, bias ``[N]`` → ``[R, N]`` in x's dtype, sums in float32.

    Streams w once; meant for R ≤ 32, where it beats a blocked product. x and w share one dtype of float32, bfloat16,
    float16, last dimension dense. A row's result does not depend on the rows beside it. Bad arguments raise
    ``RuntimeError``.
    """
    out: torch.Tensor = torch.ops.pyruntime.linear_rows(x, w, bias)
    return out
