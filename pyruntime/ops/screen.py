"""The largest product of a row with a matrix, without reading all of the matrix."""

from __future__ import annotations

from typing import NamedTuple

import torch

from pyruntime.ops import _library
from pyruntime.ops.linear import has_panels
from pyruntime.ops.quantized import pack_int8

# Longer columns could overflow float32 in a product that the bounds cover.
LONGEST = 2.0**40


class Screen(NamedTuple):
    """A matrix ``[N, K]`` as int8, as ``pack_int8`` lays it out, and of each column float32 ``[N]`` upper bounds on the
    length of its error and on its own length."""

    packed: torch.Tensor
    errors: torch.Tensor
    lengths: torch.Tensor


def make_screen(w: torch.Tensor) -> Screen | None:
    """Of w ``[N, K]`` of float32 or bfloat16; None where no bounds hold: it has NaN, infinity or numbers near it."""
    lost = torch.empty(2, w.shape[0])
    try:
        packed = pack_int8(w, lost)
    except ValueError:
        return None
    return Screen(packed, *lost) if float(lost.max()) <= LONGEST else None


def largest_columns(x: torch.Tensor, panels: torch.Tensor, screen: Screen) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest element of each row of ``linear_panels(x, panels)``: its column, the lowest of equal ones, int64
    ``[R]``, and its value, float32 ``[R]``, to the bit.

    x ``[R, K]``; panels: what ``pack_panels`` makes of a matrix, and screen what ``make_screen`` makes of it. Products
    in int8 bound those of every column (``csrc/cpu/kernels/screen.cpp``); only panels whose upper bound reaches the
    greatest lower one are read and multiplied. Column -1 where that is not known: rows with NaN, infinity or a length
    outside 2^-40 to 2^40, and rows for which so many panels are left that the whole product costs as much. Bad
    arguments raise ``RuntimeError``.
    """
    found: tuple[torch.Tensor, torch.Tensor] = torch.ops.pyruntime.largest_columns(x, panels, *screen)
    return found


def has_screen(dtype: torch.dtype) -> bool:
    """Whether ``largest_columns`` is faster than the whole product of a dtype: where the processor multiplies int8."""
    return has_panels(dtype) and _library.build_info()["cpu_capability"] == "avx512bf16"


@_library._fake("largest_columns")
def _(x, w, screen, errors, lengths):  # type: ignore[no-untyped-def]
    columns = w.shape[0] * 16
    _library._check_panels(x, w, columns, None)
    _library._check_int8(x, screen, columns, None)
    _library._check(errors, "errors", columns)
    _library._check(lengths, "lengths", columns)
    return x.new_empty((x.shape[0],), dtype=torch.int64), x.new_empty((x.shape[0],), dtype=torch.float32)
