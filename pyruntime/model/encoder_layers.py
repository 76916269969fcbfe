"""Layers of an encoder as one compiled op each: BERT's kind, whose norms end their halves.

A layer has six linears, of which the first three make queries, keys and values, and two norms; which linear makes what,
and whether the op gives what the layer gives, is found out by trying it on rows of its own and on random ones. Its
linears then lie in panels, as those of a decoder's fused layer do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from pyruntime.model.attention import AttentionContext, attending, current_context
from pyruntime.model.fused_layers import AGREE_INT8, AGREE_LAYER, layer_calls
from pyruntime.model.fusion import AGREE, difference, name_of, put_forward
from pyruntime.model.linear import OwnLinear, packed_in_panels, put_panels
from pyruntime.ops.linear import ACTIVATION_NUMBERS, COLUMNS
from pyruntime.types import ForwardBatch

LENGTHS = (9, 4)
# Standard deviations of the random rows that a layer is tried on besides its own: in the larger ones attention picks
# single keys, and activations are far from straight.
SCALES = (0.3, 1.0, 3.0)
NUM_LINEARS, NUM_NORMS = 6, 2


@torch.inference_mode()
def fuse_encoder_layers(model: Any, offset: int) -> int:
    """Replaces the layers of an encoder that it can; returns how many. ``offset``: as ``run_packed`` takes it."""
    body = model.base_model
    if next(body.parameters()).device.type != "cpu":
        return 0
    known = {layer: parts for layer in body.modules() if (parts := _parts(layer)) is not None}
    if not known:
        return 0
    context = AttentionContext(_batch(), causal=False, options={})
    calls = layer_calls(body, list(known), context, offset)
    return sum(_fuse_layer(layer, parts, *calls[layer], context) for layer, parts in known.items() if layer in calls)


@dataclass(frozen=True, slots=True)
class _Parts:
    """Modules in the order in which a layer names them."""

    linears: list[Any]
    norms: list[torch.nn.LayerNorm]
    activation: int


def _parts(layer: torch.nn.Module) -> _Parts | None:
    """None for what is not such a layer."""
    modules = list(layer.modules())
    linears = [module for module in modules if isinstance(module, OwnLinear)]
    norms = [module for module in modules if isinstance(module, torch.nn.LayerNorm)]
    if len(linears) != NUM_LINEARS or len(norms) != NUM_NORMS:
        return None
    if any(norm.weight is None or norm.bias is None or norm.weight.dim() != 1 for norm in norms):
        return None
    leaves = [module for module in modules if not list(module.children()) and not list(module.parameters())]
    names = {name for leaf in leaves if (name := name_of(leaf)) is not None}
    has_others = {*layer.parameters()} - {weight for each in (*linears, *norms) for weight in each.parameters()}
    return None if len(names) != 1 or has_others else _Parts(linears, norms, ACTIVATION_NUMBERS[names.pop()])


def _batch() -> ForwardBatch:
    return ForwardBatch(
        rows=[],
        input_ids=torch.arange(3, 3 + sum(LENGTHS)),
        positions=torch.tensor([place for length in LENGTHS for place in range(length)]),
        query_starts=torch.tensor([0, LENGTHS[0], sum(LENGTHS)], dtype=torch.int32),
    )


def _fuse_layer(layer: Any, parts: _Parts, args: Any, kwargs: Any, output: Any, context: AttentionContext) -> bool:
    known = context.options or {}
    options = next((known[each] for each in layer.modules() if each in known), None)
    hidden = args[0] if args else kwargs.get("hidden_states")
    if options is None or not isinstance(output, torch.Tensor):
        return False
    ordered = _ordered(parts.linears, hidden, options)
    if ordered is None:
        return False
    # The better order of the norms, not the first that is near: rounded rows cannot tell alike norms apart by a bound.
    orders = parts.norms, parts.norms[::-1]
    able = [own for norms in orders if (own := _Fused(ordered, norms, parts.activation, options)).fits]
    far = [_distance(layer, own, hidden, args[1:], kwargs, context.batch) for own in able]
    bound = AGREE_INT8 if ordered[0].matrix.dtype is torch.uint8 else AGREE_LAYER[hidden.dtype]
    if not far or min(far) > bound:
        return False
    best = able[far.index(min(far))]
    best.lay_out()
    _put(layer, best)
    return True


def _ordered(linears: list[Any], hidden: torch.Tensor, options: dict[str, Any]) -> list[Any] | None:
    """Those that made queries, keys and values of the rows ``hidden`` [1, T, H] first; None where it was not they."""
    left, found = [each for each in linears[:3] if each.in_features == hidden.shape[-1]], []
    for name in ("query", "key", "value"):
        heads = options[name].flatten(1)
        made = [each for each in left if difference(each(hidden)[0], heads) <= AGREE[hidden.dtype]]
        if not made:
            return None
        found.append(made[0])
        left.remove(made[0])
    return found + linears[3:]


class _Fused:
    """One layer's op with everything but the rows at hand."""

    def __init__(self, linears: list[Any], norms: list[Any], activation: int, options: dict[str, Any]) -> None:
        self._linears = linears
        self.is_int8 = linears[0].matrix.dtype is torch.uint8
        self._panels = [each.matrix if self.is_int8 else packed_in_panels(each.weight) for each in linears]
        has_all = all(panels is not None for panels in self._panels)
        is_whole = all(each.out_features % COLUMNS == 0 for each in linears)
        is_plain = not (options["causal"] or options["softcap"]) and options["sinks"] is None
        self.fits = has_all and is_whole and is_plain
        biases = [None if each.bias is None else each.bias.float() for each in linears]
        q, k, v, o, up, down = zip(self._panels, biases, strict=True)
        first, second = ((norm.weight, norm.bias) for norm in norms)
        heads = options["query"].shape[1], options["key"].shape[1]
        windows = options["scale"], options["window_left"], options["window_right"]
        epsilons = (norm.eps for norm in norms)
        weights = (*q, *k, *v, *o, *first, *up, *down, *second)
        self._arguments = (*weights, *epsilons, activation, *heads, *windows)

    def __call__(self, hidden: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """hidden [1, T, H] → [1, T, H]."""
        rows: torch.Tensor = torch.ops.pyruntime.encoder_layer.default(hidden[0], starts, *self._arguments)
        return rows.unsqueeze(0)

    def lay_out(self) -> None:
        """The layer's linears keep their panels alone."""
        for linear, panels in zip(self._linears, self._panels, strict=True):
            if not self.is_int8:
                put_panels(linear, panels)


def _distance(layer: Any, own: _Fused, hidden: torch.Tensor, others: Any, kwargs: Any, batch: ForwardBatch) -> float:
    """The largest ``difference`` from the layer over all rows that are tried; infinite where the op takes none."""
    random = torch.Generator().manual_seed(0)
    tried = [(torch.randn(hidden.shape, generator=random) * scale).to(hidden.dtype) for scale in SCALES]
    named = {name: value for name, value in kwargs.items() if name != "hidden_states"}
    try:
        with attending(AttentionContext(batch, causal=False)):
            pairs = [(own(rows, batch.query_starts), layer(rows, *others, **named)) for rows in (hidden, *tried)]
    except RuntimeError:  # shapes that the op does not know
        return math.inf
    return max(difference(*pair) for pair in pairs)


def _put(layer: Any, own: _Fused) -> None:
    plain = type(layer).forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        context = current_context()
        if context is None or context.cache is not None or context.unattended is not None:
            return plain(self, *args, **kwargs)
        return own(args[0] if args else kwargs["hidden_states"], context.batch.query_starts)

    put_forward(layer, forward)
