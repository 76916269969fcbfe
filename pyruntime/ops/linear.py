"""The linear for few rows, over weights as they are or as int8."""

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


def linear_rows_int8(
    x: torch.Tensor, w: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``(x @ w.T) * scales + bias``: x ``[R, K]``, w int8 ``[N, K]``, scales float32 ``[N]``, bias ``[N]``.

    The answer ``[R, N]`` has x's dtype (float32, bfloat16, float16); weights are exact in float32, where products and
    sums are made. Streams w once. A row's result does not depend on the rows beside it. Bad arguments raise
    ``RuntimeError``.
    """
    out: torch.Tensor = torch.ops.pyruntime.linear_rows_int8(x, w, scales, bias)
    return out


def quantize_int8(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """w ``[N, K]`` → (int8 ``[N, K]``, scales float32 ``[N]``): symmetric, a row's largest magnitude is ±127.

    ``w ≈ int8 * scales[:, None]`` to half a scale; a row of zeros has scale 0. NaN or infinity raises ``ValueError``.
    """
    wide = w.float()
    scales = wide.abs().amax(-1) / 127 if w.shape[-1] else wide.new_zeros(w.shape[0])
    if not bool(torch.isfinite(scales).all()):
        raise ValueError("w: cannot be quantised, it holds NaN or infinity")
    rounded = torch.round(wide / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None])
    return rounded.clamp(-127, 127).to(torch.int8), scales
