"""Row invariance of a transformers body: what torch computes for a row must not hang on the rows beside it.

Two kinds of torch's functions on a CPU break that. Matrix products choose their blocking, and with it the order of
their sums, by the number of rows. Elementwise functions of the exponential come in vectors and, for what is left over
at the end of each thread's part, in scalars, whose last bit may differ; which elements are left over depends on the
size of the whole. Both are replaced while the body runs, wherever it calls them: linears, the transposed linears of
GPT-2, experts, routers, gates and activations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

# A multiple of every vector length, twice unrolled, and below what torch divides among threads (32,768).
PIECE = 16384
VECTORS = 64

# (x [..., K], weight [N, K], bias [N] or None) → [..., N], each row by itself.
Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


class RowInvariant(TorchFunctionMode):
    """While it is entered, a row's result depends on that row alone."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        product = functools.partial(_product, linear)
        self._replaced: dict[Any, Callable[..., Any]] = {
            functional.linear: functools.partial(_linear, linear),
            torch.addmm: functools.partial(_addmm, linear),
        }
        for multiply in (torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.__matmul__):
            self._replaced[multiply] = functools.partial(product, multiply)
        for function in ELEMENTWISE:
            self._replaced[function] = functools.partial(in_vectors, function)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._replaced.get(func, func)(*args, **(kwargs or {}))


# Those of torch's whose vector and scalar code were seen to differ, in float32 or bfloat16.
ELEMENTWISE = (
    functional.silu,
    functional.gelu,
    functional.softplus,
    functional.mish,
    functional.elu,
    functional.celu,
    functional.selu,
    functional.sigmoid,
    torch.sigmoid,
    torch.Tensor.sigmoid,
    torch.rsqrt,
    torch.Tensor.rsqrt,
)


def make_row_invariant(model: Any, linear: Linear) -> None:
    """A transformers model computes under ``RowInvariant`` from now on: its body, and the activations of its heads.

    ``linear``: as ``Linear`` says. Linears of heads are the caller's to switch.
    """
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # one product an expert, by functions that are replaced
    mode, body = RowInvariant(linear), model.base_model
    inside = set(body.modules())
    activations = [each for each in model.modules() if each not in inside and _is_function(each)]
    for module in (body, *activations):
        _run_under(mode, module)


def _is_function(module: torch.nn.Module) -> bool:
    """Without weights, as activations are."""
    return next(module.children(), None) is None and next(module.parameters(), None) is None


def _run_under(mode: TorchFunctionMode, module: torch.nn.Module) -> None:
    kind = type(module)

    @functools.wraps(kind.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with mode:
            return kind.forward(self, *args, **kwargs)

    # The class and not the object, so that whoever puts a forward on the object for a while gets this one back.
    module.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def in_vectors(function: Callable[..., torch.Tensor], x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """An elementwise function of x, any shape: every element by its vector code."""
    if x.device.type != "cpu":
        return function(x, *args, **kwargs)
    count = x.numel()
    flat = functional.pad(x.reshape(-1), (0, -count % VECTORS))
    pieces = [function(piece, *args, **kwargs) for piece in flat.split(PIECE)]
    return torch.cat(pieces)[:count].view(x.shape)


def _linear(
    linear: Linear, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    return linear(input, weight.contiguous(), bias)


def _addmm(linear: Linear, input: torch.Tensor, mat1: torch.Tensor, mat2: torch.Tensor) -> torch.Tensor:
    return linear(mat1, mat2.t().contiguous(), input)


def _product(
    linear: Linear, multiply: Callable[..., torch.Tensor], left: torch.Tensor, right: torch.Tensor
) -> torch.Tensor:
    """Rows times a matrix; products of anything else (rotary angles, whose sums have one term) stay torch's."""
    if left.dim() < 2 or right.dim() != 2:
        return multiply(left, right)
    return linear(left, right.t().contiguous(), None)
