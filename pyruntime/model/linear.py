"""Linear layers by whichever product is the fastest for the rows at hand, with the activation that follows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn import functional

from pyruntime.model.memory import on_huge_pages
from pyruntime.model.row_invariant import make_row_invariant
from pyruntime.ops.linear import (
    ACTIVATIONS,
    COLUMNS,
    has_panels,
    linear_into,
    linear_panels,
    linear_rows,
    pack_panels,
)

# From here on transposing the weights pays; below, they are streamed as they lie.
PANEL_ROWS = 96
# Where there is no kernel of panels torch's blocked product is the faster one past this.
MAX_ROWS = 32


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    row_invariant: bool = False,
    activation: str = "none",
    up: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [..., K] → activation(x @ weight.T + bias) [..., N], times x @ up.T where there is ``up`` (then without bias).

    weight, up [N, K]; ``activation``: one of ``ops.linear.ACTIVATIONS``. The products sum in different orders.
    ``row_invariant`` takes the one for few rows whatever their number, whose result for a row does not depend on the
    others.
    """
    product = own_product(x.numel() // x.shape[-1], weight, row_invariant)
    if product is None:
        y = ACTIVATIONS[activation](functional.linear(x, weight, bias))
        return y if up is None else y * functional.linear(x, up)
    return _of_rows(product, x, weight, bias, up, activation)


def _of_rows(product: Callable[..., torch.Tensor], x: torch.Tensor, *others: Any) -> torch.Tensor:
    """x [..., K] → [..., N] by a product of rows."""
    rows = product(x.reshape(-1, x.shape[-1]).contiguous(), *others)
    return rows.view(*x.shape[:-1], rows.shape[1])


def own_product(num_rows: int, weight: torch.Tensor, row_invariant: bool) -> Callable[..., torch.Tensor] | None:
    """The kernel to take, ``linear_rows`` or ``linear_panels``; None for torch's own product. Of ``weight`` only its
    dtype and device count."""
    if weight.device.type != "cpu":
        return None
    if row_invariant:
        return linear_rows
    if has_panels(weight.dtype):
        return linear_rows if num_rows < PANEL_ROWS else linear_panels
    return linear_rows if num_rows <= MAX_ROWS else None


class Buffer:
    """Memory for an answer that lives until the next one, kept from call to call: where the answer has a vocabulary's
    width, fresh pages cost as much as the product."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, row_invariant: bool
    ) -> torch.Tensor:
        """``linear`` of rows x [R, K], in this memory unless torch's own product is taken."""
        product = own_product(x.shape[0], weight, row_invariant)
        if product is None:
            return functional.linear(x, weight, bias)
        out = self.take(x.shape[0], weight.shape[0], weight.dtype)
        linear_into(out, x, weight, bias, by_panels=product is linear_panels)
        return out

    def take(self, num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """This memory as [num_rows, width], to be written over."""
        if self._memory.numel() < num_rows * width or self._memory.dtype is not dtype:
            self._memory = torch.empty(num_rows * width, dtype=dtype)
        return self._memory[: num_rows * width].view(num_rows, width)


class OwnLinear(torch.nn.Linear):
    """``torch.nn.Linear`` by way of ``linear``."""

    row_invariant = False

    @property
    def matrix(self) -> torch.Tensor:
        """What ``decoder_layer`` takes for its weights."""
        return self.weight

    @property
    def is_int8(self) -> bool:
        return self.matrix.dtype is torch.uint8

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.product(input)

    def product(self, x: torch.Tensor, activation: str = "none", up: OwnLinear | None = None) -> torch.Tensor:
        """With what follows it, as in ``linear``; ``up`` is a second one of the same shape, without bias."""
        second = up.weight if up is not None else None
        return linear(x, self.weight, self.bias, self.row_invariant, activation, second)

    def gated_halves(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        """The first half of the answer activated, times the second; without bias."""
        gate, up = self.weight.chunk(2)
        return linear(x, gate, None, self.row_invariant, activation, up)


class _RowInvariantLinear(OwnLinear):
    row_invariant = True


class PackedLinear(OwnLinear):
    """``torch.nn.Linear`` whose weights lie in ``panels`` alone, as ``pack_panels`` gives them: as fast for few rows as
    for many, and row-invariant. ``weight`` tells shape and dtype, no values."""

    panels: torch.Tensor

    @property
    def matrix(self) -> torch.Tensor:
        return self.panels

    def product(self, x: torch.Tensor, activation: str = "none", up: OwnLinear | None = None) -> torch.Tensor:
        return _of_rows(linear_panels, x, self.panels, self.bias, up.matrix if up is not None else None, activation)


def pack(linears: Iterable[OwnLinear]) -> bool:
    """Makes them ``PackedLinear``, where all of them can be."""
    plain: list[Any] = list(linears)
    packed = [panels for each in plain if (panels := packed_in_panels(each.weight)) is not None]
    if len(packed) < len(plain):
        return False
    for module, panels in zip(plain, on_huge_pages(packed), strict=True):
        put_panels(module, panels)
    return True


def put_panels(module: Any, panels: torch.Tensor | None) -> None:
    """An ``OwnLinear`` becomes a ``PackedLinear``."""
    row_invariant = module.row_invariant
    module.__class__ = PackedLinear
    module.row_invariant = row_invariant
    module.register_buffer("panels", panels, persistent=False)
    let_go(module)


def packed_in_panels(weight: torch.Tensor) -> torch.Tensor | None:
    """Weights [N, K] as ``linear_panels`` takes them besides; None where there is no kernel for that."""
    is_possible = weight.device.type == "cpu" and has_panels(weight.dtype) and weight.shape[0] % COLUMNS == 0
    return pack_panels(weight) if is_possible else None


def let_go(module: Any) -> None:
    """The memory of a module's weights. Bodies ask for their dtype; whoever reads their values gets an error and not
    wrong ones."""
    shape = torch.empty_like(module.weight, device="meta")
    module.weight = torch.nn.Parameter(shape, requires_grad=False)


def use_own_linears(model: torch.nn.Module, row_invariant: bool) -> int:
    """Switch every plain ``nn.Linear`` of the model over, weights untouched; returns how many.

    ``row_invariant``: what lies between them in the body is made so too.
    """
    plain = [module for module in model.modules() if type(module) is torch.nn.Linear]
    for module in plain:
        module.__class__ = _RowInvariantLinear if row_invariant else OwnLinear
    if row_invariant:
        make_row_invariant(model, functools.partial(linear, row_invariant=True))
    return len(plain)
