"""Plain torch twins of the compiled ops, in float64. Tests compare against them; nothing else imports them."""

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


def pool(
    hidden: torch.Tensor, starts: torch.Tensor, kinds: torch.Tensor, dimensions: torch.Tensor, normalize: torch.Tensor
) -> torch.Tensor:
    """Twin of ``ops.pooling.pool``."""
    bounds = starts.tolist()
    out = torch.zeros(len(bounds) - 1, hidden.shape[1], dtype=torch.float64)
    for i, (a, b) in enumerate(pairwise(bounds)):
        rows, width = hidden[a:b].double(), int(dimensions[i])
        vector = (rows[-1], rows[0], rows.mean(0))[int(kinds[i])][:width]
        if normalize[i]:
            vector = torch.nn.functional.normalize(vector, dim=0, eps=1e-12)
        out[i, :width] = vector
    return out


def label_logits(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    label_ids: torch.Tensor,
    label_starts: torch.Tensor,
) -> torch.Tensor:
    """Twin of ``ops.scores.label_logits``."""
    row = torch.repeat_interleave(torch.arange(rows.shape[0]), label_starts.diff().long())
    logits = (rows[row].double() * weight[label_ids].double()).sum(-1)
    return logits if bias is None else logits + bias[label_ids].double()


def logsumexp(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, softcap: float = 0.0, scale: float = 1.0
) -> torch.Tensor:
    """Twin of ``ops.scores.logsumexp``."""
    logits = linear_rows(rows, weight, bias) * scale
    if softcap > 0:
        logits = softcap * torch.tanh(logits / softcap)
    return torch.logsumexp(logits, -1)


def linear_rows(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Twin of ``ops.linear.linear_rows``."""
    out = x.double() @ w.double().T
    return out if bias is None else out + bias.double()


def filtered_distribution(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> torch.Tensor:
    """What ``ops.sampling.sample`` draws one row ``[V]`` from: float64 probabilities ``[V]``, by sorting."""
    if temperature == 0:
        return torch.nn.functional.one_hot(logits.float().argmax(), logits.shape[0]).double()
    shifted = (logits.float() - logits.float().max()) / temperature
    order = torch.sort(shifted, descending=True, stable=True).indices
    p = torch.exp(shifted.double())[order]
    if 0 < top_k < p.shape[0]:
        p[top_k:] = 0
    if top_p < 1:
        reached = torch.cumsum(p, 0) >= top_p * p.sum()
        p[int(reached.double().argmax()) + 1 :] = 0
    p[p < min_p * p[0]] = 0
    out = torch.zeros_like(p)
    out[order] = p / p.sum()
    return out
