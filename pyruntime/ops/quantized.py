"""Linears over int8 weights, packed once, and rows that become int8 on the way."""

from __future__ import annotations

import torch

from pyruntime.ops.linear import ACTIVATION_NUMBERS

# Elements of a row, in depth, that share a scale.
GROUP = 128
# Columns of a panel, and how many follow each other in depth within a word of 32 bits.
COLUMNS, DEPTH = 16, 4
# Rows of a matrix that are packed at a time, so that no second one of its size exists beside it.
SLICE = 256 * COLUMNS


def linear_int8(
    x: torch.Tensor,
    w: torch.Tensor,
    columns: int,
    bias: torch.Tensor | None = None,
    up: torch.Tensor | None = None,
    activation: str = "none",
) -> torch.Tensor:
    """``activation(x @ W.T + bias)``, ``* (x @ U.T)`` with ``up``: x ``[R, K]`` → ``[R, columns]`` in x's dtype.

    w, up: matrices W, U ``[columns, K]`` as ``pack_int8`` gives them; bias ``[columns]``, not with ``up``. x (float32,
    bfloat16, float16) becomes int8 too, with a scale for each ``GROUP`` elements of a row, whose largest magnitude is
    ±127; products within a group are exact, all else is float32 until the answer is rounded. A row's result does not
    depend on the rows beside it; one that holds NaN or infinity comes out as NaN. Bad arguments raise
    ``RuntimeError``.
    """
    out: torch.Tensor = torch.ops.pyruntime.linear_int8(x, w, columns, bias, up, ACTIVATION_NUMBERS[activation])
    return out


def linear_int8_into(out: torch.Tensor, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """``linear_int8`` without an activation into out ``[R, columns]`` of x's dtype."""
    torch.ops.pyruntime.linear_int8_into(x, w, bias, out)


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


def pack_int8(w: torch.Tensor) -> torch.Tensor:
    """w ``[N, K]`` quantised and laid out for ``linear_int8``: uint8 ``[ceil(N / 16), 64 * (ceil(K / 4) + 1)]``.

    A row is a panel of 16 columns: for each four neighbours in depth 16 times 4 bytes, ``int8 + 128``, and behind the
    last the 16 scales as float32. What is past N or K is zero. NaN or infinity raises ``ValueError``.
    """
    num_columns, depth = w.shape
    words = -(-depth // DEPTH)
    out = torch.empty(-(-num_columns // COLUMNS), COLUMNS * DEPTH * (words + 1), dtype=torch.uint8)
    for begin in range(0, num_columns, SLICE):
        values, scales = quantize_int8(w[begin : begin + SLICE])
        missing = -values.shape[0] % COLUMNS
        values = torch.nn.functional.pad(values, (0, words * DEPTH - depth, 0, missing))
        scales = torch.nn.functional.pad(scales, (0, missing))
        panels = values.view(-1, COLUMNS, words, DEPTH).transpose(1, 2)
        place = out[begin // COLUMNS : begin // COLUMNS + panels.shape[0]]
        place[:, : -COLUMNS * DEPTH] = panels.reshape(panels.shape[0], -1).view(torch.uint8) ^ 0x80
        place[:, -COLUMNS * DEPTH :] = scales.view(-1, COLUMNS).view(torch.uint8)
    return out
