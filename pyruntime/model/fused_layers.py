"""Decoder layers of Llama's kind as one compiled op each, so that few rows are not kept waiting by Python.

Norms, gated MLPs and rotations have been recognised by then (``fusion``); a layer is replaced when all its parts are
known and the op gives what the layer gives, on a small batch over a small cache: each as it is, and one of a kind in
float32 too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from pyruntime.model.attention import AttentionContext, attending, current_context
from pyruntime.model.decoder_body import Angles, Rotation, put_stack, rotations_of
from pyruntime.model.fusion import difference, put_forward
from pyruntime.model.kv_cache import KVCache, LayerShape
from pyruntime.model.linear import OwnLinear, own_product, pack
from pyruntime.model.trial import AGREE_INT8, AGREE_LAYER, Call, in_float32, layer_calls
from pyruntime.ops import between
from pyruntime.ops.decoder import DecoderStack, LayerArguments
from pyruntime.ops.linear import ACTIVATION_NUMBERS, linear_panels
from pyruntime.ops.quantized import COLUMNS
from pyruntime.types import ForwardBatch

BLOCK_SIZE = 4
LENGTHS = (9, 4)
# Roundings of the sum with a row, whose values may be many times larger.
SUMS = 4

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


@torch.inference_mode()
def fuse_layers(model: Any, shapes: dict[int, LayerShape], offset: int) -> int:
    """Replaces the layers of a causal model that it can; returns how many. ``shapes``: of the cache, by layer."""
    body = model.base_model
    dtype = next(body.parameters()).dtype
    known = {layer: parts for layer in body.modules() if (parts := _parts(layer)) is not None}
    if not known or next(body.parameters()).device.type != "cpu":
        return 0
    cache = KVCache(shapes, 8, BLOCK_SIZE, dtype, "cpu")
    furthest = getattr(body.config, "max_position_embeddings", None) or 0
    context = AttentionContext(_batch(furthest - offset), cache, options={})
    exact = replace(context, cache=KVCache(shapes, 8, BLOCK_SIZE, torch.float32, "cpu"), options={})
    calls: dict[torch.nn.Module, Call] = {}
    rotations = rotations_of(body, lambda: calls.update(layer_calls(body, list(known), context, offset)))
    proven: set[Any] = set()
    tried = {layer: _fuse_layer(layer, calls[layer], context, exact, proven) for layer in known if layer in calls}
    fused = {layer: own for layer, own in tried.items() if own is not None}
    if not offset and fused and list(fused) == list(getattr(body, "layers", [])):
        _fuse_body(body, [(own, own.angles(*calls[layer][:2])) for layer, own in fused.items()], rotations, context)
    return len(fused)


def _fuse_body(
    body: Any, layers: list[tuple[_Fused, Angles]], rotations: list[tuple[Rotation, Angles]], context: AttentionContext
) -> None:
    """All layers as one op, where each rotates by angles that are known."""
    places = [next((i for i, (_, made) in enumerate(rotations) if made[0] is cos), None) for _, (cos, _) in layers]
    arguments = [own.arguments(place) for (own, _), place in zip(layers, places, strict=True) if place is not None]
    if len(arguments) == len(layers):
        first, numbers = layers[0][0], [own.number for own, _ in layers]
        stack = DecoderStack(arguments)
        put_stack(body, stack, numbers, [each for each, _ in rotations], context, first.takes, first.by_panels)


@dataclass(frozen=True, slots=True)
class _Parts:
    """The op's weights in its order, without caches and sinks, and what its norms and its MLP compute."""

    weights: tuple[torch.Tensor | None, ...]
    epsilon: float
    weight_offset: float
    activation: int
    is_int8: bool  # some or all of its linears, in panels of whole columns

    @property
    def kind(self) -> Any:
        """Equal of layers of a class that differ by the values of their weights alone."""
        shapes = [None if each is None else (*each.shape, each.dtype) for each in self.weights]
        return self.epsilon, self.weight_offset, self.activation, *shapes


def _parts(layer: Any) -> _Parts | None:
    """None for what is not such a layer."""
    attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    linears: list[Any] = [getattr(attention, name, None) for name in PROJECTIONS]
    gated = getattr(getattr(mlp, "fused", None), "keywords", {})
    if mlp is None or gated.get("merged") is not False or mlp.down_proj.bias is not None:
        return None
    if not all(isinstance(each, OwnLinear) for each in linears) or not hasattr(attention, "layer_idx"):
        return None
    # Gemma has a norm before and one behind each half; all others have the first of the two alone.
    has_four = hasattr(layer, "pre_feedforward_layernorm")
    before_mlp = "pre_feedforward_layernorm" if has_four else "post_attention_layernorm"
    norms = [getattr(layer, name, None) for name in ("input_layernorm", before_mlp)]
    ends = ("post_attention_layernorm", "post_feedforward_layernorm")
    after = [getattr(layer, name, None) if has_four else None for name in ends]
    heads = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    in_int8 = [each for each in (*linears, *_mlp_linears(mlp)) if each.is_int8]
    if any(each.out_features % COLUMNS for each in in_int8):
        return None  # the op takes as many columns as the panels have
    settings = {_norm_settings(norm) for norm in (*norms, *(norm for norm in (*heads, *after) if norm is not None))}
    (first, *others) = settings
    if others or first is None:
        return None
    q, k, v, o = ((each.matrix, each.bias) for each in linears)
    weights = [norm.weight if norm is not None else None for norm in (*norms, *heads, *after)]
    before, middle, q_norm, k_norm, after_attention, after_mlp = weights
    gates = tuple(each.matrix for each in _mlp_linears(mlp))
    order = (before, *q, *k, *v, q_norm, k_norm, *o, after_attention, middle, *gates, after_mlp)
    return _Parts(order, *first, ACTIVATION_NUMBERS[gated["activation"]], is_int8=bool(in_int8))


def _mlp_linears(mlp: Any) -> tuple[OwnLinear, ...]:
    return mlp.gate_proj, mlp.up_proj, mlp.down_proj


def _norm_settings(norm: Any) -> tuple[float, float] | None:
    fused = getattr(norm, "fused", None)
    return (fused.keywords["epsilon"], fused.keywords["offset"]) if fused and "offset" in fused.keywords else None


def _batch(furthest: int = 0) -> ForwardBatch:
    """Two texts, their blocks not in order. The second one's positions are the last before ``furthest``, if there is
    one: some models scale what is far behind."""
    starts, last = [0, LENGTHS[0], sum(LENGTHS)], max(furthest - LENGTHS[1], 0)
    tables = [[5, 2, 7], [3, 0, 0]]
    slots = [tables[i][p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for i in (0, 1) for p in range(LENGTHS[i])]
    return ForwardBatch(
        rows=[],
        input_ids=torch.arange(3, 3 + sum(LENGTHS)),
        positions=torch.tensor([*range(LENGTHS[0]), *(last + place for place in range(LENGTHS[1]))]),
        query_starts=torch.tensor(starts, dtype=torch.int32),
        kv_lengths=torch.tensor(LENGTHS, dtype=torch.int32),
        block_tables=torch.tensor(tables, dtype=torch.int32),
        slot_mapping=torch.tensor(slots),
    )


def _fuse_layer(
    layer: Any, call: Call, context: AttentionContext, exact: AttentionContext, proven: set[Any]
) -> _Fused | None:
    own = _agreeing(layer, call, context)
    if own is None:
        return None
    if own.kind not in proven and not _agrees_in_float32(layer, call, exact):
        return None
    proven.add(own.kind)
    own.pack(layer)
    plain = type(layer).forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        context = current_context()
        hidden = args[0] if args else kwargs["hidden_states"]
        if context is None or context.cache is None or not own.takes(hidden.shape[1]):
            return plain(self, *args, **kwargs)
        return own(hidden, own.angles(args, kwargs), context)

    put_forward(layer, forward)
    return own


def _agrees_in_float32(layer: Any, call: Call, exact: AttentionContext) -> bool:
    """Where rows are rounded more, norms that are alike cannot be told apart."""
    args, kwargs, output = call
    if output.dtype is torch.float32:
        return True
    copy, args, kwargs = in_float32(layer, args, kwargs)
    with attending(exact):
        output = copy(*args, **kwargs)
    return _agreeing(copy, (args, kwargs, output), exact) is not None


def _agreeing(layer: Any, call: Call, context: AttentionContext) -> _Fused | None:
    """The layer's op, where it does what the layer has done."""
    parts, (args, kwargs, output) = _parts(layer), call
    own = _Fused(layer, parts, context, args, kwargs) if parts is not None else None
    if parts is None or own is None or not own.fits or not isinstance(output, torch.Tensor):
        return None
    hidden = args[0] if args else kwargs["hidden_states"]
    angles, stored = own.angles(args, kwargs), own.stored(context)
    try:
        rows = own(hidden, angles, context)
        queries = _queries(layer, parts, hidden[0], angles)
    except RuntimeError:  # shapes that the op does not know
        return None
    bound = (AGREE_INT8 if parts.is_int8 else AGREE_LAYER)[output.dtype]
    # Where attention adds little to a row, the row alone would not show what is wrong with it.
    heads = zip((queries, *own.stored(context)), (own.asked, *stored), strict=True)
    fits = all(difference(*pair) <= bound for pair in heads) and _agree(rows, output, hidden, bound)
    return own if fits else None


def _agree(own: torch.Tensor, output: torch.Tensor, hidden: torch.Tensor, bound: float) -> bool:
    """Whether both add the same to ``hidden``, whose own values may be so large that nothing else would be seen."""
    added = (output.float() - hidden.float()).abs().amax(-1, keepdim=True)
    rounding = SUMS * torch.finfo(output.dtype).eps * output.float().abs()
    return bool(((own.float() - output.float()).abs() <= bound * added + rounding).all())


def _queries(layer: Any, parts: _Parts, hidden: torch.Tensor, angles: Angles) -> torch.Tensor:
    """[T, heads, width], as the op makes them."""
    before, norm, width = parts.weights[0], parts.weights[7], angles[0].shape[-1]
    assert before is not None
    rows = layer.self_attn.q_proj(between.rms_norm(hidden, before, parts.epsilon, parts.weight_offset))
    if norm is not None:
        rows = between.rms_norm(rows.view(-1, width), norm, parts.epsilon, parts.weight_offset)
    return between.rotate_halves(rows.view(len(hidden), -1, width), angles[0][0], angles[1][0])


class _Fused:
    """One layer's op with everything but the rows at hand."""

    def __init__(self, layer: Any, parts: _Parts, context: AttentionContext, args: Any, kwargs: Any) -> None:
        self._weights = parts.weights
        self.number: int = layer.self_attn.layer_idx
        options = (context.options or {}).get(layer.self_attn)
        # Where the rotation's cosines and sines stand among the layer's arguments.
        self._place = next((i for i, value in enumerate(args) if _are_angles(value)), None)
        self.fits = options is not None and (self._place is not None or _are_angles(kwargs.get("position_embeddings")))
        if options is None:
            return
        self._numbers = (
            parts.epsilon,
            parts.weight_offset,
            parts.activation,
            options["scale"],
            options["window_left"],
            options["softcap"],
        )
        self._sinks = options["sinks"]
        self.kind = type(layer), parts.kind, self._numbers, self._sinks is None
        self.asked: torch.Tensor = options["query"]
        self._row_invariant = layer.mlp.down_proj.row_invariant
        # Whether matrices lie as some kernel alone takes them.
        self._is_laid_out = parts.is_int8

    def stored(self, context: AttentionContext) -> tuple[torch.Tensor, torch.Tensor]:
        """A copy of the keys and values [T, heads, width] of the batch's rows."""
        cache, slots = context.cache, context.batch.slot_mapping
        assert cache is not None and slots is not None
        return cache.keys[self.number].flatten(0, 1)[slots], cache.values[self.number].flatten(0, 1)[slots]

    def takes(self, num_rows: int) -> bool:
        """Where there is no kernel for many rows, torch's own linears are the better ones."""
        return self._is_laid_out or self._product(num_rows) is not None

    def by_panels(self, num_rows: int) -> bool:
        """How the op multiplies plain matrices."""
        return self._product(num_rows) is linear_panels

    def _product(self, num_rows: int) -> Any:
        norm = self._weights[0]
        assert norm is not None
        return own_product(num_rows, norm, self._row_invariant)

    def arguments(self, angles: int) -> LayerArguments:
        """Of the op, with which of a body's angles it rotates by."""
        return LayerArguments((*self._weights, self._sinks), *self._numbers, angles)

    def pack(self, layer: Any) -> None:
        """The layer's linears, and takes their matrices."""
        linears = [getattr(layer.self_attn, name) for name in PROJECTIONS]
        parts = _parts(layer) if pack([*linears, *_mlp_linears(layer.mlp)]) else None
        if parts is not None:
            self._weights, self._is_laid_out = parts.weights, True

    def angles(self, args: Any, kwargs: Any) -> Angles:
        found: Angles = args[self._place] if self._place is not None else kwargs["position_embeddings"]
        return found

    def __call__(self, hidden: torch.Tensor, angles: Angles, context: AttentionContext) -> torch.Tensor:
        """hidden [1, T, H] → [1, T, H]; keys and values of its rows are in the cache afterwards."""
        batch, cache = context.batch, context.cache
        assert cache is not None
        rows: torch.Tensor = torch.ops.pyruntime.decoder_layer(
            hidden[0],
            angles[0][0],
            angles[1][0],
            cache.keys[self.number],
            cache.values[self.number],
            batch.slot_mapping,
            batch.query_starts,
            batch.kv_lengths,
            batch.block_tables,
            *self._weights,
            self._sinks,
            *self._numbers,
            self.by_panels(hidden.shape[1]),
        )
        return rows.unsqueeze(0)


def _are_angles(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(isinstance(each, torch.Tensor) for each in value)
