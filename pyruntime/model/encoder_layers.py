"""Layers of an encoder as one compiled op each: BERT's kind, whose norms end their halves.

A layer has six linears, of which the first three make queries, keys and values, and two norms; which linear makes what,
and whether the op gives what the layer gives, is found out by trying it on rows of its own and on random ones: for one
layer of a kind in float32, then for each as it is. Its linears then lie in panels, as those of a decoder's fused layer
do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from pyruntime.model.attention import AttentionContext, attending, current_context
from pyruntime.model.fusion import AGREE, difference, name_of, put_forward
from pyruntime.model.linear import OwnLinear, packed_in_panels, put_panels
from pyruntime.model.short_bodies import shorten
from pyruntime.model.trial import AGREE_INT8, AGREE_LAYER, in_float32, layer_calls, whole_texts
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
    batch = whole_texts(LENGTHS, torch.arange(3, 3 + sum(LENGTHS)))
    context = AttentionContext(batch, causal=False, options={})
    calls = layer_calls(body, list(known), context, offset)
    orders: dict[Any, _Order] = {}
    replaced: dict[torch.nn.Module, _Fused] = {}
    within: set[Any] = set()  # what stands around a single layer looks like one, too
    for layer in known:
        args, kwargs, output = calls.get(layer, ((), {}, None))
        is_plain = isinstance(output, torch.Tensor) and layer not in within
        if is_plain and (own := _fuse_layer(layer, known[layer], orders, args, kwargs, context)) is not None:
            replaced[layer] = own
            within.update(layer.modules())
    if replaced:
        shorten(body, replaced, offset)
    return len(replaced)


@dataclass(frozen=True, slots=True)
class _Parts:
    """Modules in the order in which a layer names them, and their names."""

    linears: list[Any]
    norms: list[torch.nn.LayerNorm]
    activation: int
    names: list[str]

    def kind(self, options: dict[str, Any]) -> Any:
        """Equal of layers of a class whose parts do the same."""
        shapes = [(*each.weight.shape, each.bias is None, each.is_int8) for each in self.linears]
        asked = [options[name] for name in ("causal", "scale", "window_left", "window_right", "softcap")]
        return self.activation, *self.names, *shapes, *(norm.eps for norm in self.norms), *asked

    def ordered(self, order: _Order) -> _Parts:
        linears, norms = [self.linears[i] for i in order[0]], [self.norms[i] for i in order[1]]
        return replace(self, linears=linears, norms=norms)


# Which linear and which norm comes first, second and so on: numbers into ``_Parts``.
_Order = tuple[list[int], tuple[int, int]]


def _parts(layer: torch.nn.Module) -> _Parts | None:
    """None for what is not such a layer."""
    modules = dict(layer.named_modules())
    linears = [module for module in modules.values() if isinstance(module, OwnLinear)]
    norms = [module for module in modules.values() if isinstance(module, torch.nn.LayerNorm)]
    if len(linears) != NUM_LINEARS or len(norms) != NUM_NORMS:
        return None
    if any(norm.weight is None or norm.bias is None or norm.weight.dim() != 1 for norm in norms):
        return None
    leaves = [module for module in modules.values() if not list(module.children()) and not list(module.parameters())]
    activations = {name for leaf in leaves if (name := name_of(leaf)) is not None}
    has_others = {*layer.parameters()} - {weight for each in (*linears, *norms) for weight in each.parameters()}
    if len(activations) != 1 or has_others:
        return None
    names = [name for name, module in modules.items() if isinstance(module, OwnLinear | torch.nn.LayerNorm)]
    return _Parts(linears, norms, ACTIVATION_NUMBERS[activations.pop()], names)


def _fuse_layer(
    layer: Any, parts: _Parts, orders: dict[Any, _Order], args: Any, kwargs: Any, context: AttentionContext
) -> _Fused | None:
    options = _options(layer, context)
    if options is None:
        return None
    kind = type(layer), parts.kind(options)
    order = orders.get(kind) or _order(layer, args, kwargs, context)
    if order is None:
        return None
    orders[kind] = order
    parts = parts.ordered(order)
    panels = _panels(parts.linears, options)
    own = _Fused(parts, panels, options) if panels is not None else None
    if own is None or _distance(layer, own, args, kwargs, context.batch) > _bound(parts, _hidden(args, kwargs)):
        return None
    own.lay_out()
    _put(layer, own)
    return own


def _hidden(args: Any, kwargs: Any) -> torch.Tensor:
    """The rows [1, T, H] that a layer is called with."""
    hidden: torch.Tensor = args[0] if args else kwargs["hidden_states"]
    return hidden


def _options(layer: Any, context: AttentionContext) -> dict[str, Any] | None:
    """What the layer's attention asked for."""
    known = context.options or {}
    return next((known[each] for each in layer.modules() if each in known), None)


def _order(layer: Any, args: Any, kwargs: Any, context: AttentionContext) -> _Order | None:
    """Of a layer's linears queries, keys and values first, of its norms that of the attention. Found in float32: where
    rows are rounded more, norms that are alike cannot be told apart."""
    if _hidden(args, kwargs).dtype is not torch.float32:
        layer, args, kwargs = in_float32(layer, args, kwargs)
        context = replace(context, options={})
        with attending(context):
            layer(*args, **kwargs)
    parts, options = _parts(layer), _options(layer, context)
    linears = _projections_first(parts.linears, _hidden(args, kwargs), options) if parts and options else None
    if parts is None or options is None or linears is None:
        return None
    panels = _panels([parts.linears[i] for i in linears], options)
    if panels is None:
        return None
    far = {}
    for norms in (0, 1), (1, 0):
        own = _Fused(parts.ordered((linears, norms)), panels, options)
        far[norms] = _distance(layer, own, args, kwargs, context.batch)
    best = min(far, key=far.__getitem__)  # and not the first that is near: int8 rounds too
    return (linears, best) if far[best] <= _bound(parts, _hidden(args, kwargs)) else None


def _bound(parts: _Parts, hidden: torch.Tensor) -> float:
    return (AGREE_INT8 if parts.linears[0].is_int8 else AGREE_LAYER)[hidden.dtype]


def _projections_first(linears: list[Any], hidden: torch.Tensor, options: dict[str, Any]) -> list[int] | None:
    """Numbers of those that made queries, keys and values of the rows ``hidden`` [1, T, H], then of the others; None
    where it was not they."""
    left, found = [i for i in range(3) if linears[i].in_features == hidden.shape[-1]], []
    for name in ("query", "key", "value"):
        heads = options[name].flatten(1)
        made = [i for i in left if difference(linears[i](hidden)[0], heads) <= AGREE[hidden.dtype]]
        if not made:
            return None
        found.append(made[0])
        left.remove(made[0])
    return [*found, *range(3, NUM_LINEARS)]


def _panels(linears: list[Any], options: dict[str, Any]) -> list[torch.Tensor] | None:
    """Their matrices as the op takes them; None where it knows no such layer."""
    is_whole = all(each.out_features % COLUMNS == 0 for each in linears)
    if options["causal"] or options["softcap"] or options["sinks"] is not None or not is_whole:
        return None
    panels = [each.matrix if each.is_int8 else packed_in_panels(each.weight) for each in linears]
    known = [each for each in panels if each is not None]
    return known if len(known) == len(panels) else None


class _Fused:
    """One layer's op with everything but the rows at hand."""

    def __init__(self, parts: _Parts, panels: list[torch.Tensor], options: dict[str, Any]) -> None:
        """``parts`` in order, ``panels`` of its linears."""
        self._linears = parts.linears
        self._panels = panels
        biases = [None if each.bias is None else each.bias.float() for each in parts.linears]
        q, k, v, o, up, down = zip(panels, biases, strict=True)
        first, second = ((norm.weight, norm.bias) for norm in parts.norms)
        heads = options["query"].shape[1], options["key"].shape[1]
        windows = options["scale"], options["window_left"], options["window_right"]
        epsilons = (norm.eps for norm in parts.norms)
        weights = (*q, *k, *v, *o, *first, *up, *down, *second)
        self._arguments = (*weights, *epsilons, parts.activation, *heads, *windows)

    def __call__(self, hidden: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """hidden [1, T, H] → [1, T, H]."""
        rows: torch.Tensor = torch.ops.pyruntime.encoder_layer.default(hidden[0], starts, *self._arguments)
        return rows.unsqueeze(0)

    def lay_out(self) -> None:
        """The layer's linears keep their panels alone."""
        for linear, panels in zip(self._linears, self._panels, strict=True):
            if not linear.is_int8:
                put_panels(linear, panels)


def _distance(layer: Any, own: _Fused, args: Any, kwargs: Any, batch: ForwardBatch) -> float:
    """The largest ``difference`` from the layer over all rows that are tried; infinite where the op takes none."""
    hidden, random = _hidden(args, kwargs), torch.Generator().manual_seed(0)
    tried = [(torch.randn(hidden.shape, generator=random) * scale).to(hidden.dtype) for scale in SCALES]
    named = {name: value for name, value in kwargs.items() if name != "hidden_states"}
    try:
        with attending(AttentionContext(batch, causal=False)):
            pairs = [(own(rows, batch.query_starts), layer(rows, *args[1:], **named)) for rows in (hidden, *tried)]
    except RuntimeError:  # shapes that the op does not know
        return math.inf
    return max(difference(*pair) for pair in pairs)


def _put(layer: Any, own: _Fused) -> None:
    plain = type(layer).forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        context = current_context()
        if context is None or context.cache is not None or context.unattended is not None:
            return plain(self, *args, **kwargs)
        return own(_hidden(args, kwargs), context.batch.query_starts)

    put_forward(layer, forward)
