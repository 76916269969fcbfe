"""How whole layers are tried: what they are called with, how near an op must come to them, and a layer in float32,
where no rounding hides that it does not compute what it is taken for."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from pyruntime.model.attention import AttentionContext
from pyruntime.model.fusion import AGREE, noting_calls
from pyruntime.model.packed import run_packed
from pyruntime.types import ForwardBatch

# Of what a layer adds to its rows: it rounds several times as often as a module, and each rounding goes on. In bfloat16
# the layers of Gemma 3 270M stay below 0.026.
AGREE_LAYER = {dtype: 3 * bound for dtype, bound in AGREE.items()}
# The same where linears are int8: what differs by a rounding may take another step there.
AGREE_INT8 = {torch.float32: 0.01, torch.bfloat16: 0.06, torch.float16: 0.06}

# Arguments and answer of a layer.
Call = tuple[tuple[Any, ...], dict[str, Any], Any]


def whole_texts(lengths: Sequence[int], input_ids: torch.Tensor) -> ForwardBatch:
    """A batch of texts of these lengths, without a cache."""
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    return ForwardBatch([], input_ids, torch.cat([torch.arange(length) for length in lengths]), starts)


def layer_calls(body: Any, layers: list[Any], context: AttentionContext, offset: int) -> dict[torch.nn.Module, Call]:
    """What each layer is called with in a forward, and what it answers."""
    calls: dict[torch.nn.Module, Call] = {}

    def note(layer: Any, args: Any, kwargs: Any, output: Any) -> None:
        calls[layer] = (args, kwargs, output)

    with noting_calls(layers, note):
        run_packed(body, context.batch, context, offset, None)
    return calls


def in_float32(layer: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """A copy of a layer, and what it is called with, in float32; weights that are int8 stay so."""
    return copy.deepcopy(layer).float(), _widened(args), _widened(kwargs)


def _widened(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.float() if value.is_floating_point() else value
    if isinstance(value, tuple | list):
        return type(value)(_widened(each) for each in value)
    return {name: _widened(each) for name, each in value.items()} if isinstance(value, dict) else value
