"""Products of rows with a matrix of weights: for few rows and for many."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch.nn import functional

from pyruntime.ops import _library

# Columns of a panel.
COLUMNS = 16
# By name, in the order of the kernels' numbers, as torch computes them.
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda x: x,
    "gelu": functional.gelu,
    "gelu_tanh": functools.partial(functional.gelu, approximate="tanh"),
    "silu": functional.silu,
}
ACTIVATION_NUMBERS = {name: number for number, name in enumerate(ACTIVATIONS)}


def linear_rows(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    up: torch.Tensor | None = None,
    activation: str = "none",
) -> torch.Tensor:
    """``activation(x @ w.T + bias)``, ``* (x @ up.T)`` with ``up``: x ``[R, K]``, w, up ``[N, K]``, bias ``[N]`` (not
    with ``up``) → ``[R, N]`` in x's dtype, sums in float32.

    Streams w once; meant for few rows, where it beats a blocked product. All share one dtype of float32, bfloat16,
    float16 (bias: any of them), last dimension dense. ``activation``: one of ``ACTIVATIONS``, computed in float32. A
    row's result does not depend on the rows beside it. Bad arguments raise ``RuntimeError``.
    """
    out: torch.Tensor = torch.ops.pyruntime.linear_rows(x, w, bias, up, ACTIVATION_NUMBERS[activation])
    return out


def linear_panels(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    up: torch.Tensor | None = None,
    activation: str = "none",
) -> torch.Tensor:
    """What ``linear_rows`` computes, for many rows: w is transposed in panels on the way, x read once for each. For any
    number of rows where w, and up with it, is what ``pack_panels`` makes of a matrix; the bits are the same.

    Only where ``has_panels`` says so, else ``RuntimeError``. Activations are applied before anything is rounded.
    """
    out: torch.Tensor = torch.ops.pyruntime.linear_panels(x, w, bias, up, ACTIVATION_NUMBERS[activation])
    return out


def pack_panels(w: torch.Tensor) -> torch.Tensor:
    """w ``[N, K]`` of float32 or bfloat16, N a multiple of ``COLUMNS``, as ``linear_panels`` takes it besides:
    ``[N / 16, ceil(K / e), 16, e]``, e elements to a word of 32 bits, zeros past K.

    A panel of 16 columns after the other, and of each the words in the order of depth: so few rows are multiplied with
    it as fast as many, without transposing.
    """
    num_columns, depth = w.shape
    if num_columns % COLUMNS:
        raise ValueError(f"w: expected whole panels of {COLUMNS} columns, got {num_columns}")
    per = 4 // w.element_size()
    whole = functional.pad(w, (0, -depth % per))
    return whole.view(num_columns // COLUMNS, COLUMNS, -1, per).transpose(1, 2).contiguous()


def linear_into(
    out: torch.Tensor, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None, by_panels: bool = False
) -> None:
    """``linear_rows`` without an activation, or ``linear_panels``, into out ``[R, N]`` of x's dtype."""
    torch.ops.pyruntime.linear_into(x, w, bias, by_panels, out)


@functools.cache
def has_panels(dtype: torch.dtype) -> bool:
    """Whether ``linear_panels`` is there for a dtype and the best that this processor has: with 512 bits a vector, but
    not where it multiplies bfloat16 by tiles (AMX), which torch's own product uses."""
    capability = str(_library.build_info()["cpu_capability"])
    if dtype is torch.float32:
        return capability.startswith("avx512")
    return dtype is torch.bfloat16 and capability == "avx512bf16" and not torch.cpu._is_amx_tile_supported()
