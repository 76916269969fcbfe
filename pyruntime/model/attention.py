"""Packed and paged attention behind transformers' attention interface.

transformers calls ``packed_attention_forward`` in every layer with post-rotary query, key and value
[1, heads, T, width]. What its own masks would do (causality, windows, sequence borders) and the cache
are handled here, by the compiled kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from pyruntime.errors import ModelLoadError
from pyruntime.model.kv_cache import KVCache, LayerShape
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
    """What one layer asked of attention during the probe forward."""

    shape: LayerShape
    is_causal: bool
    window: int | None


@dataclass(slots=True)
class AttentionContext:
    """Handed through the model's forward to each layer. ``probe`` collects traits instead of using a cache."""

    batch: ForwardBatch
    cache: KVCache | None = None
    probe: dict[int, LayerTraits] | None = None


def packed_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    attention_context: AttentionContext | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """Attention over the packed batch. query [1, Hq, T, D], key/value [1, Hk, T, ·] → [1, T, Hq, Dv]."""
    if attention_context is None:
        raise ModelLoadError(f"{type(module).__name__} does not hand keyword arguments down to its attention")
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    if attention_context.probe is not None:
        _record(attention_context.probe, module, k, v, causal, sliding_window, keywords)
    options: dict[str, Any] = {
        "scale": query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        "window_left": -1 if sliding_window is None else sliding_window - 1,
        "softcap": float(softcap or 0.0),
        "sinks": s_aux,
    }
    if attention_context.cache is None:
        output = attention_ops.packed_attention(q, k, v, attention_context.batch.query_starts, causal=causal, **options)
    else:
        layer = cast(int, module.layer_idx)
        output = _paged(layer, q, k, v, attention_context.batch, attention_context.cache, options)
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
    if window is not None and not causal:
        raise ModelLoadError(f"{name} uses a two-sided attention window, which is not served yet")
    layer = cast(int, getattr(module, "layer_idx", len(probe)))
    if layer in probe:
        raise ModelLoadError(f"{name}: two attention modules share layer index {layer}")
    probe[layer] = LayerTraits(LayerShape(key.shape[1], key.shape[2], value.shape[2]), causal, window)


def _no_mask(*_: Any, **__: Any) -> None:
    return None


AttentionInterface.register(IMPLEMENTATION, packed_attention_forward)
AttentionMaskInterface.register(IMPLEMENTATION, _no_mask)
