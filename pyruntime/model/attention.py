"""Packed and paged attention behind transformers' attention interface.

transformers calls ``packed_attention_forward`` in every layer with post-rotary query, key and value
[1, heads, T, width]. What its own masks would do (causality, windows, sequence borders) and the cache
are handled here, by the compiled kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import AttentionInterface

from pyruntime.errors import ModelLoadError
from pyruntime.model.kv_cache import KVCache, LayerShape
from pyruntime.model.unattended import Unattended, attend_behind
from pyruntime.ops import attention as attention_ops
from pyruntime.types import ForwardBatch

IMPLEMENTATION = "pyruntime_packed"

# Keywords that some layers pass along and that do not change what attention computes here.
HARMLESS_KEYWORDS = frozenset(
    "position_ids position_embeddings cache_position use_cache cache output_attentions output_hidden_states "
    "return_dict head_mask past_key_value past_key_values logits_to_keep input_ids inputs_embeds token_type_ids".split()
)


@dataclass(slots=True)
class LayerTraits:
    """What one layer asked of attention during the probe forward.

    ``window``: how many keys a row sees on each side it may look to, itself included; None is all of them.
    """

    shape: LayerShape
    is_causal: bool
    window: int | None


@dataclass(slots=True)
class AttentionContext:
    """What the layers of a running forward need to know. ``probe`` collects their traits instead of using a cache;
    ``causal`` answers for layers that do not say themselves; ``unattended`` tokens are seen by none of their text.
    ``options`` collects what each attention module asked the kernel for, its queries, keys and values [T, heads, D]
    with it."""

    batch: ForwardBatch
    cache: KVCache | None = None
    probe: dict[int, LayerTraits] | None = None
    causal: bool = True
    unattended: Unattended | None = None
    options: dict[torch.nn.Module, dict[str, Any]] | None = None


# Beside the model's arguments, since not every model hands unknown keywords down to its attention.
_current: ContextVar[AttentionContext] = ContextVar("attention_context")


@contextmanager
def attending(context: AttentionContext) -> Iterator[None]:
    """Layers that run inside the block, in this thread, attend over ``context``'s batch."""
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)


def current_context() -> AttentionContext | None:
    """Of the packed forward that this thread is in."""
    return _current.get(None)


def is_attending() -> bool:
    """Whether this thread is in a packed forward."""
    return _current.get(None) is not None


def packed_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """Attention over the packed batch. query [1, Hq, T, D], key/value [1, Hk, T, ·] → [1, T, Hq, Dv]."""
    context = _current.get()
    causal = bool(getattr(module, "is_causal", context.causal) if is_causal is None else is_causal)
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    if context.probe is not None:
        _record(context.probe, module, k, v, causal, sliding_window, keywords)
    window = -1 if sliding_window is None else sliding_window - 1
    options: dict[str, Any] = {
        "scale": query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        "window_left": window,
        "softcap": float(softcap or 0.0),
        "sinks": None if s_aux is None else s_aux.float(),
    }
    # Two-sided windows reach as far ahead as back: ModernBERT, EmbeddingGemma.
    ahead = -1 if causal else window
    if context.options is not None:
        asked = {"causal": causal, "window_right": ahead, "query": q, "key": k, "value": v}
        context.options[module] = options | asked
    if context.cache is None:
        options["window_right"] = ahead
        behind = context.unattended
        starts = context.batch.query_starts if behind is None else behind.starts
        output = attention_ops.packed_attention(q, k, v, starts, causal=causal, **options)
        if behind is not None:
            if causal or options["softcap"] or s_aux is not None:
                raise ValueError(f"{type(module).__name__}: tokens that are not attended to, under such attention")
            attend_behind(output, q, k, v, behind.spans, options["scale"], window)
    else:
        output = _paged(cast(int, module.layer_idx), q, k, v, context.batch, context.cache, options)
    return output.unsqueeze(0), None


def _paged(
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    batch: ForwardBatch,
    cache: KVCache,
    options: dict[str, Any],
) -> torch.Tensor:
    if batch.slot_mapping is None or batch.kv_lengths is None or batch.block_tables is None:
        raise ValueError("a causal model's batch must say where its keys and values lie")
    cache.store(layer, key, value, batch.slot_mapping)
    return attention_ops.paged_attention(
        query,
        cache.keys[layer],
        cache.values[layer],
        batch.query_starts,
        batch.kv_lengths,
        batch.block_tables,
        **options,
    )


def _record(
    probe: dict[int, LayerTraits],
    module: torch.nn.Module,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: bool,
    window: int | None,
    keywords: dict[str, Any],
) -> None:
    name = type(module).__name__
    unknown = sorted(k for k, v in keywords.items() if k not in HARMLESS_KEYWORDS and v is not None and v is not False)
    if unknown:
        raise ModelLoadError(f"{name} passes attention options that the packed kernels do not know: {unknown}")
    layer = getattr(module, "layer_idx", None)
    if layer is None:
        if causal:
            raise ModelLoadError(f"{name} does not know its layer index, so its keys cannot be cached")
        layer = len(probe)
    if layer in probe:
        raise ModelLoadError(f"{name}: two attention modules share layer index {layer}")
    probe[layer] = LayerTraits(LayerShape(key.shape[1], key.shape[2], value.shape[2]), causal, window)


# Registered as an attention without masks: transformers then makes none, and does not look at the positions for borders
# of texts either, which would wait for a device.
AttentionInterface.register(IMPLEMENTATION, packed_attention_forward)
