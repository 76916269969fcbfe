"""Decoder layers of Llama's kind as one compiled op each, so that few rows are not kept waiting by Python.

Norms, gated MLPs and rotations have been recognised by then (``fusion``); a layer is replaced when all its parts are
known and the op gives what the layer gives, on a small batch over a small cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pyruntime.model.attention import AttentionContext, current_context
from pyruntime.model.fusion import AGREE, difference, put_forward
from pyruntime.model.kv_cache import KVCache, LayerShape
from pyruntime.model.linear import OwnLinear, own_product, pack
from pyruntime.model.packed import run_packed
from pyruntime.ops import between
from pyruntime.ops.linear import ACTIVATION_NUMBERS, linear_panels
from pyruntime.ops.quantized import COLUMNS
from pyruntime.types import ForwardBatch

BLOCK_SIZE = 4
LENGTHS = (9, 4)
# Of what a layer adds to its rows: it rounds several times as often as a module, and each rounding goes on. In bfloat16
# the layers of Gemma 3 270M stay below 0.026.
AGREE_LAYER = {dtype: 3 * bound for dtype, bound in AGREE.items()}
# The same where linears are int8: what differs by a rounding may take another step there.
AGREE_INT8 = 0.06
# Roundings of the sum with a row, whose values may be many times larger.
SUMS = 4

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")

Calls = dict[torch.nn.Module, tuple[tuple[Any, ...], dict[str, Any], Any]]


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
    calls = layer_calls(body, list(known), context, offset)
    return sum(_fuse_layer(layer, known[layer], *calls[layer], context) for layer in known if layer in calls)


@dataclass(frozen=True, slots=True)
class _Parts:
    """The op's weights in its order, without caches and sinks, and what its norms and its MLP compute."""

    weights: tuple[torch.Tensor | None, ...]
    epsilon: float
    weight_offset: float
    activation: int

    @property
    def is_int8(self) -> bool:
        """Some or all of its linears, in panels of whole columns."""
        return any(weight is not None and weight.dtype is torch.uint8 for weight in self.weights)


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
    if any(each.matrix.dtype is torch.uint8 and each.out_features % COLUMNS for each in (*linears, *_mlp_linears(mlp))):
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
    return _Parts(order, *first, ACTIVATION_NUMBERS[gated["activation"]])


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


def layer_calls(body: Any, layers: list[Any], context: AttentionContext, offset: int) -> Calls:
    """What each layer is called with in a forward, and what it answers."""
    calls: Calls = {}

    def note(layer: Any, args: Any, kwargs: Any, output: Any) -> None:
        calls[layer] = (args, kwargs, output)

    hooks = [layer.register_forward_hook(note, with_kwargs=True) for layer in layers]
    try:
        run_packed(body, context.batch, context, offset, None)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _fuse_layer(layer: Any, parts: _Parts, args: Any, kwargs: Any, output: Any, context: AttentionContext) -> bool:
    own = _Fused(layer, parts, context, args, kwargs)
    if not own.fits or not isinstance(output, torch.Tensor):
        return False
    hidden = args[0] if args else kwargs["hidden_states"]
    angles, stored = own.angles(args, kwargs), own.stored(context)
    try:
        rows = own(hidden, angles, context)
        queries = _queries(layer, parts, hidden[0], angles)
    except RuntimeError:  # shapes that the op does not know
        return False
    bound = max(AGREE_LAYER[output.dtype], AGREE_INT8 if parts.is_int8 else 0.0)
    # Where attention adds little to a row, the row alone would not show what is wrong with it.
    heads = zip((queries, *own.stored(context)), (own.asked, *stored), strict=True)
    if not (all(difference(*pair) <= bound for pair in heads) and _agree(rows, output, hidden, bound)):
        return False
    own.pack(layer)
    plain = type(layer).forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        context = current_context()
        hidden = args[0] if args else kwargs["hidden_states"]
        if context is None or context.cache is None or not own.takes(hidden):
            return plain(self, *args, **kwargs)
        return own(hidden, own.angles(args, kwargs), context)

    put_forward(layer, forward)
    return True


def _agree(own: torch.Tensor, output: torch.Tensor, hidden: torch.Tensor, bound: float) -> bool:
    """Whether both add the same to ``hidden``, whose own values may be so large that nothing else would be seen."""
    added = (output.float() - hidden.float()).abs().amax(-1, keepdim=True)
    rounding = SUMS * torch.finfo(output.dtype).eps * output.float().abs()
    return bool(((own.float() - output.float()).abs() <= bound * added + rounding).all())


def _queries(
    layer: Any, parts: _Parts, hidden: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
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
        self._layer: int = layer.self_attn.layer_idx
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
        self.asked: torch.Tensor = options["query"]
        self._row_invariant = layer.mlp.down_proj.row_invariant
        # Whether matrices lie as some kernel alone takes them.
        self._is_laid_out = parts.is_int8

    def stored(self, context: AttentionContext) -> tuple[torch.Tensor, torch.Tensor]:
        """A copy of the keys and values [T, heads, width] of the batch's rows."""
        cache, slots = context.cache, context.batch.slot_mapping
        assert cache is not None and slots is not None
        return cache.keys[self._layer].flatten(0, 1)[slots], cache.values[self._layer].flatten(0, 1)[slots]

    def takes(self, hidden: torch.Tensor) -> bool:
        """Where there is no kernel for many rows, torch's own linears are the better ones."""
        return self._is_laid_out or own_product(hidden.shape[1], hidden, self._row_invariant) is not None

    def pack(self, layer: Any) -> None:
        """The layer's linears, and takes their matrices."""
        linears = [getattr(layer.self_attn, name) for name in PROJECTIONS]
        parts = _parts(layer) if pack([*linears, *_mlp_linears(layer.mlp)]) else None
        if parts is not None:
            self._weights, self._is_laid_out = parts.weights, True

    def angles(self, args: Any, kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        found: tuple[torch.Tensor, torch.Tensor] = (
            args[self._place] if self._place is not None else kwargs["position_embeddings"]
        )
        return found

    def __call__(
        self, hidden: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], context: AttentionContext
    ) -> torch.Tensor:
        """hidden [1, T, H] → [1, T, H]; keys and values of its rows are in the cache afterwards."""
        batch, cache = context.batch, context.cache
        assert cache is not None
        rows: torch.Tensor = torch.ops.pyruntime.decoder_layer(
            hidden[0],
            angles[0][0],
            angles[1][0],
            cache.keys[self._layer],
            cache.values[self._layer],
            batch.slot_mapping,
            batch.query_starts,
            batch.kv_lengths,
            batch.block_tables,
            *self._weights,
            self._sinks,
            *self._numbers,
            own_product(hidden.shape[1], hidden, self._row_invariant) is linear_panels,
        )
        return rows.unsqueeze(0)


def _are_angles(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(isinstance(each, torch.Tensor) for each in value)
