"""Linear layers that stream their weights when a batch has few rows, as decode steps do."""

from __future__ import annotations

import functools

import torch
from torch.nn import functional

from pyruntime.model.row_invariant import make_row_invariant
from pyruntime.ops.linear import linear_rows

# Past this many rows torch's blocked product is the faster one.
MAX_ROWS = 32


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, row_invariant: bool = False
) -> torch.Tensor:
    """x [..., K] times weight [N, K] → [..., N]: the compiled kernel for few rows, torch's own for many.

    The two sum in different orders. ``row_invariant`` takes the kernel for any number of rows, whose
    result for a row does not depend on the others.
    """
    num_rows = x.numel() // x.shape[-1]
    if x.device.type != "cpu" or (num_rows > MAX_ROWS and not row_invariant):
        return functional.linear(x, weight, bias)
    rows = linear_rows(x.reshape(num_rows, x.shape[-1]).contiguous(), weight, bias)
    return rows.view(*x.shape[:-1], weight.shape[0])


class FewRowsLinear(torch.nn.Linear):
    """``torch.nn.Linear`` by way of ``linear``."""

    row_invariant = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return linear(input, self.weight, self.bias, self.row_invariant)


class _RowInvariantLinear(FewRowsLinear):
    row_invariant = True


def use_few_rows_linears(model: torch.nn.Module, row_invariant: bool) -> int:
    """Switch every plain ``nn.Linear`` of the model over, weights untouched; returns how many.

    ``row_invariant``: what lies between them in the body is made so too.
    """
    plain = [module for module in model.modules() if type(module) is torch.nn.Linear]
    for module in plain:
        module.__class__ = _RowInvariantLinear if row_invariant else FewRowsLinear
    if row_invariant:
        make_row_invariant(model, functools.partial(linear, row_invariant=True))
    return len(plain)
