"""Plain torch twins of the attention ops, in float64; part of ``reference``."""

from __future__ import annotations

import math
from itertools import pairwise

import torch


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    offset: int,
    *,
    causal: bool,
    scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """q ``[L, Hq, D]`` at positions offset.. against keys ``[K, Hk, D]`` at positions 0.. → float64 ``[L, Hq, Dv]``."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    query = torch.arange(q.shape[0])[:, None] + offset
    key = torch.arange(k.shape[0])[None, :]
    visible = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool)
    if causal:
        visible &= key <= query
    if window_left >= 0:
        visible &= key >= query - window_left
    if window_right >= 0:
        visible &= key <= query + window_right
    scores = scores.masked_fill(~visible, -math.inf)
    if sinks is not None:
        column = sinks.double()[:, None, None].expand(-1, q.shape[0], 1)
        weights = torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1]
    else:
        weights = torch.softmax(scores, -1)
    return torch.einsum("hqk,khd->qhd", weights, v)


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
    """Twin of ``ops.attention.packed_attention``."""
    bounds = starts.tolist()
    parts = [
        _attend(
            q[a:b], k[a:b], v[a:b], 0, causal=causal, scale=scale, window_left=window_left,
            window_right=window_right, softcap=softcap, sinks=sinks,
        )
        for a, b in pairwise(bounds)
    ]  # fmt: skip
    return torch.cat(parts)


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
    """Twin of ``ops.attention.paged_attention``."""
    bounds, size, parts = query_starts.tolist(), k_cache.shape[1], []
    for i, (a, b) in enumerate(pairwise(bounds)):
        length = int(kv_lengths[i])
        blocks = block_tables[i, : -(-length // size)].long()
        k = k_cache[blocks].flatten(0, 1)[:length]
        v = v_cache[blocks].flatten(0, 1)[:length]
        parts.append(
            _attend(
                q[a:b], k, v, length - (b - a), causal=causal, scale=scale, window_left=window_left,
                window_right=-1, softcap=softcap, sinks=sinks,
            )
        )  # fmt: skip
    return torch.cat(parts)
