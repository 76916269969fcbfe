"""Attention over packed sequences, their keys beside the queries or in a paged cache.

Both: softmax over the visible keys of ``softcap(scale * q·k)`` times v, in float32, blocked over keys; query head h
reads key head ``h // (Hq // Hk)``. ``softcap`` c > 0 makes a score s into ``c * tanh(s / c)``. ``sinks`` float32
``[Hq]`` add ``exp(sinks[h])`` to the softmax's denominator. q, k, v share one dtype of float32, bfloat16, float16; any
strides with a dense last dimension, at most 64 query heads a key head. scale is 0 or of
float32's normal range, softcap 0 or 1e-30 to 1e30. A row that sees no key answers zero. Keys and values that a row does
not see do not matter to it, NaN included. Bad shapes, dtypes, scalars or indexes raise ``RuntimeError``.
A row's answer is bit-identical in any batch, in any chunking of its prompt, and for any page size.
"""

from __future__ import annotations

import torch

from pyruntime.ops import _library  # noqa: F401  registers the ops


def packed_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    *,
    causal: bool,
    scale: float,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Each sequence attends to its own rows.

    q ``[T, Hq, D]``, k ``[T, Hk, D]``, v ``[T, Hk, Dv]``, starts int32 ``[S+1]`` → ``[T, Hq, Dv]`` in q's dtype.
    ``window_left``/``window_right``: how many keys before/after the query are visible beside itself, -1 unlimited;
    ``causal`` hides every later key whatever ``window_right`` is.
    """
    out: torch.Tensor = torch.ops.pyruntime.packed_attention(
        q, k, v, starts, causal, scale, window_left, window_right, softcap, sinks
    )
    return out


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    query_starts: torch.Tensor,
    kv_lengths: torch.Tensor,
    block_tables: torch.Tensor,
    *,
    causal: bool = True,
    scale: float,
    window_left: int = -1,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Each sequence attends to its keys in a paged cache, which already holds those of its query rows.

    q ``[T, Hq, D]``, k_cache ``[N, B, Hk, D]``, v_cache ``[N, B, Hk, Dv]`` (N blocks of B keys, any B ≥ 1),
    query_starts int32 ``[S+1]``, kv_lengths int32 ``[S]``, block_tables int32 ``[S, M]`` (entries past a sequence's
    last block are not read) → ``[T, Hq, Dv]``. Query row j of sequence i, of L_i rows, stands at position
    ``kv_lengths[i] - L_i + j``.
    """
    out: torch.Tensor = torch.ops.pyruntime.paged_attention(
        q, k_cache, v_cache, query_starts, kv_lengths, block_tables, causal, scale, window_left, softcap, sinks
    )
    return out
