"""Linears over int8 weights, packed once, and rows that become int8 on the way."""

from __future__ import annotations

import torch

from pyruntime.ops.linear import ACTIVATION_NUMBERS

# Elements of a row or of a matrix, in depth, that share a scale.
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
    bfloat16, float16) becomes whole numbers too, for each ``GROUP`` elements of a row with a scale and a place of zero:
    254 steps from the least (or 0) to the largest (or 0). Products within a group are exact, all else is float32 until
    the answer is rounded. A row's result does not
    depend on the rows beside it; one that holds NaN or infinity comes out as NaN. Bad arguments raise
    ``RuntimeError``.
    """
    out: torch.Tensor = torch.ops.pyruntime.linear_int8(x, w, columns, bias, up, ACTIVATION_NUMBERS[activation])
    return out


def linear_int8_into(out: torch.Tensor, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """``linear_int8`` without an activation into out ``[R, columns]`` of x's dtype."""
    torch.ops.pyruntime.linear_int8_into(x, w, bias, out)


def quantize_int8(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """w ``[..., K]`` → (int8 ``[..., K]``, scales float32 ``[...]``): symmetric, the largest magnitude is ±126 or ±127.

    ``w ≈ int8 * scales[..., None]`` to half a scale. Scales are bfloat16, rounded up; zeros have scale 0. NaN or
    infinity raises ``ValueError``.
    """
    wide = w.float()
    exact = wide.abs().amax(-1) / 127 if w.shape[-1] else wide.new_zeros(w.shape[:-1])
    if not bool(torch.isfinite(exact).all()):
        raise ValueError("w: cannot be quantised, it holds NaN or infinity")
    # Cutting a group off below its largest does not pay: what it costs there is more than finer steps bring.
    scales = ((exact.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)
    rounded = torch.round(wide / scales.clamp(min=torch.finfo(torch.float32).tiny)[..., None])
    return rounded.clamp(-127, 127).to(torch.int8), scales


def pack_int8(w: torch.Tensor, lost: torch.Tensor | None = None) -> torch.Tensor:
    """w ``[N, K]`` quantised in groups of depth and laid out for ``linear_int8``: uint8
    ``[ceil(N / 16), 64 * (ceil(K / 4) + ceil(K / GROUP))]``.

    A row is a panel of 16 columns, group by group: for each four neighbours in depth 16 times 4 bytes of int8, and
    behind the group's last 16 times the sum of its int8 (16 bits) and its scale (bfloat16). What is past N or K is
    zero. NaN or infinity raises ``ValueError``. ``lost``, float32 ``[2, N]``, is filled with upper bounds on the length
    of what each row of w and what it has become differ by, and on the length of what it has become.
    """
    num_columns, depth = w.shape
    groups = -(-depth // GROUP)
    used = COLUMNS * DEPTH * (-(-depth // DEPTH) + groups)
    out = torch.empty(-(-num_columns // COLUMNS), used, dtype=torch.uint8)
    for begin in range(0, num_columns, SLICE):
        part = w[begin : begin + SLICE]
        part = torch.nn.functional.pad(part, (0, groups * GROUP - depth, 0, -part.shape[0] % COLUMNS))
        part = part.view(-1, COLUMNS, groups, GROUP)
        values, scales = quantize_int8(part)
        if lost is not None:
            lost[:, begin : begin + SLICE] = _lengths(part, values * scales[..., None])[:, : num_columns - begin]
        words = values.view(*scales.shape, -1, DEPTH).permute(0, 2, 3, 1, 4).contiguous().view(torch.int32)
        # A scale's lower half is zero.
        last = (values.sum(-1, dtype=torch.int32) & 0xFFFF) | scales.view(torch.int32)
        panels = torch.cat((words.squeeze(-1), last.transpose(1, 2).unsqueeze(2)), 2).view(words.shape[0], -1)
        if used < 4 * panels.shape[1]:  # the last group is shorter, and what ends it lies nearer
            whole = panels.shape[1] - COLUMNS
            panels = torch.cat((panels[:, : used // 4 - COLUMNS], panels[:, whole:]), 1)
        place = out[begin // COLUMNS : begin // COLUMNS + panels.shape[0]]
        place.copy_(panels.view(torch.uint8))
    return out


def _lengths(exact: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
    """Of the differences and of the second, both ``[..., groups, GROUP]``: ``[2, rows]``, rounded up.

    Each sum of squares is off by a part of count · 2^-24 at most, in whatever order it is taken, and by squares that
    are too small for float32, for which 2^-40 is more than enough.
    """
    pairs = torch.stack((exact.float() - rounded, rounded)).view(2, -1, exact.shape[-2] * exact.shape[-1])
    return torch.linalg.vector_norm(pairs, dim=-1) * (1 + (pairs.shape[-1] + 16) * 2.0**-23) + 2.0**-40
