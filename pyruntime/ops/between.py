"""What lies between the linears of a body, each in one pass over its rows where plain torch makes five to ten.

Everything is computed in float32 and rounded once. Rows have one dtype of float32, bfloat16, float16 with their
parameters, last dimension dense. A row's result does not depend on the rows beside it. Bad arguments raise
``RuntimeError``.
"""

from __future__ import annotations

import torch

from pyruntime.ops import _library  # noqa: F401  registers the ops


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float, weight_offset: float = 0.0) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + epsilon) * (weight + weight_offset)``: x ``[R, W]``, weight ``[W]`` → ``[R, W]``.

    Zhang and Sennrich, 2019. Gemma keeps its weights less one: ``weight_offset`` 1.
    """
    out: torch.Tensor = torch.ops.pyruntime.rms_norm(x, weight, epsilon, weight_offset)
    return out


def layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    epsilon: float,
) -> torch.Tensor:
    """Layer norm of ``x + residual``: both ``[R, W]``, weight (None: ones) and bias (None: zeros) ``[W]`` → ``[R, W]``.

    The variance is that of the population. Ba, Kiros and Hinton, 2016.
    """
    out: torch.Tensor = torch.ops.pyruntime.layer_norm(x, residual, weight, bias, epsilon)
    return out


def rotate_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions: x ``[T, heads, W]``, W even, cos and sin ``[T, W]`` → ``[T, heads, W]``, dense.

    With halves a, b of a head: ``(a * cos_a - b * sin_a, b * cos_b + a * sin_b)``. Su et al., 2021, in the layout of
    GPT-NeoX, whose pairs are half a head apart.
    """
    out: torch.Tensor = torch.ops.pyruntime.rotate_halves(x, cos, sin)
    return out
