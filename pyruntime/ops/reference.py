"""Plain torch twins of the compiled ops, in float64. Tests compare against them; nothing else imports them."""

from __future__ import annotations

import math
from itertools import pairwise

import torch

from pyruntime.ops.linear import ACTIVATIONS
from pyruntime.ops.quantized import GROUP, quantize_int8
from pyruntime.ops.reference_attention import packed_attention, paged_attention

__all__ = [
    "adjusted_logits",
    "delimiter_rows",
    "filtered_distribution",
    "label_logits",
    "label_probabilities",
    "label_scores",
    "lexical_weights",
    "linear_int8",
    "linear_rows",
    "logsumexp",
    "packed_attention",
    "paged_attention",
    "pool",
    "pool_sparse",
    "token_logprobs",
]


def pool(
    hidden: torch.Tensor,
    starts: torch.Tensor,
    kinds: torch.Tensor,
    dimensions: torch.Tensor,
    normalize: torch.Tensor,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """Twin of ``ops.pooling.pool``."""
    bounds = starts.tolist()
    out = torch.zeros(len(bounds) - 1, hidden.shape[1], dtype=torch.float64)
    for i, (a, b) in enumerate(pairwise(bounds)):
        own, width, kind = hidden[a:b].double(), int(dimensions[i]), int(kinds[i])
        if kind == 3:
            assert rows is not None
            vector = own[int(rows[i]) - a]
        else:
            vector = (own[-1], own[0], own.mean(0))[kind]
        vector = vector[:width]
        if normalize[i]:
            vector = torch.nn.functional.normalize(vector, dim=0, eps=1e-12)
        out[i, :width] = vector
    return out


def pool_sparse(
    hidden: torch.Tensor, starts: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Twin of ``ops.pooling.pool_sparse``, dense: float64 ``[S, V]``."""
    activations = torch.log1p(torch.relu(linear_rows(hidden, weight, bias)))
    return torch.stack([activations[a:b].amax(0) for a, b in pairwise(starts.tolist())])


def lexical_weights(
    hidden: torch.Tensor,
    starts: torch.Tensor,
    token_ids: torch.Tensor,
    weight: torch.Tensor,
    bias: float,
    skip: torch.Tensor,
) -> list[dict[int, float]]:
    """Twin of ``ops.pooling.lexical_weights``: {id: weight} of each sequence."""
    weights = torch.relu(hidden.double() @ weight.double() + bias).tolist()
    ids, skipped, out = token_ids.tolist(), set(skip.tolist()), []
    for a, b in pairwise(starts.tolist()):
        best: dict[int, float] = {}
        for t in range(a, b):
            if ids[t] not in skipped and weights[t] > 0:
                best[ids[t]] = max(weights[t], best.get(ids[t], 0.0))
        out.append(dict(sorted(best.items())))
    return out


def delimiter_rows(input_ids: torch.Tensor, starts: torch.Tensor, delimiter: int) -> list[list[int]]:
    """Twin of ``ops.pooling.delimiter_rows``: the rows of each sequence."""
    ids = input_ids.tolist()
    found = [[t for t in range(a, b) if ids[t] == delimiter] for a, b in pairwise(starts.tolist())]
    return [[t - 1 for t in positions[1:]] for positions in found]


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
    return torch.logsumexp(_shape(linear_rows(rows, weight, bias), softcap, scale), -1)


def _shape(raw: torch.Tensor, softcap: float, scale: float) -> torch.Tensor:
    return softcap * torch.tanh(raw * scale / softcap) if softcap > 0 else raw * scale


def label_scores(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    label_ids: torch.Tensor,
    label_starts: torch.Tensor,
    temperature: torch.Tensor,
    *,
    softcap: float = 0.0,
    scale: float = 1.0,
) -> torch.Tensor:
    """Twin of ``ops.scores.label_scores``."""
    logits = _shape(label_logits(rows, weight, bias, label_ids, label_starts), softcap, scale)
    parts = logits.split(label_starts.diff().tolist())
    return torch.cat([torch.softmax(part / t.double(), -1) for part, t in zip(parts, temperature, strict=True)])


def label_probabilities(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    label_ids: torch.Tensor,
    label_starts: torch.Tensor,
    *,
    softcap: float = 0.0,
    scale: float = 1.0,
) -> torch.Tensor:
    """Twin of ``ops.scores.label_probabilities``."""
    row = torch.repeat_interleave(torch.arange(rows.shape[0]), label_starts.diff().long())
    return torch.softmax(_shape(linear_rows(rows, weight, bias), softcap, scale), -1)[row, label_ids]


def token_logprobs(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    token_ids: torch.Tensor,
    *,
    softcap: float = 0.0,
    scale: float = 1.0,
) -> torch.Tensor:
    """Twin of ``ops.scores.token_logprobs``."""
    logits = _shape(linear_rows(rows, weight, bias), softcap, scale)
    return torch.log_softmax(logits, -1).gather(-1, token_ids[:, None])[:, 0]


def linear_rows(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    up: torch.Tensor | None = None,
    activation: str = "none",
) -> torch.Tensor:
    """float64 [R, N]."""
    y = x.double() @ w.double().T
    y = y if bias is None else y + bias.double()
    y = ACTIVATIONS[activation](y)
    return y if up is None else y * (x.double() @ up.double().T)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float, weight_offset: float = 0.0) -> torch.Tensor:
    """float64 [R, W]."""
    wide = x.double()
    return wide / (wide.pow(2).mean(-1, keepdim=True) + epsilon).sqrt() * (weight.double() + weight_offset)


def layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    epsilon: float,
) -> torch.Tensor:
    """float64 [R, W]."""
    wide = x.double() if residual is None else x.double() + residual.double()
    centred = wide - wide.mean(-1, keepdim=True)
    y = centred / (centred.pow(2).mean(-1, keepdim=True) + epsilon).sqrt()
    y = y if weight is None else y * weight.double()
    return y if bias is None else y + bias.double()


def rotate_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """float64 [T, heads, W]: halves as real and imaginary parts, where both have the same angles."""
    a, b = x.double().chunk(2, -1)
    cos_a, cos_b = cos.double().unsqueeze(1).chunk(2, -1)
    sin_a, sin_b = sin.double().unsqueeze(1).chunk(2, -1)
    return torch.cat((a * cos_a - b * sin_a, b * cos_b + a * sin_b), -1)


def linear_int8(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    up: torch.Tensor | None = None,
    activation: str = "none",
) -> torch.Tensor:
    """Twin of ``ops.quantized.linear_int8``, of matrices that are not packed."""
    near = torch.cat([_in_steps(group) for group in x.float().split(GROUP, -1)], -1)
    return linear_rows(near, _as_int8(w), bias, None if up is None else _as_int8(up), activation)


def _in_steps(rows: torch.Tensor) -> torch.Tensor:
    """Each row in 254 steps from its least to its largest, 0 among both, which stays 0."""
    lowest, highest = rows.amin(-1, keepdim=True).clamp(max=0), rows.amax(-1, keepdim=True).clamp(min=0)
    half = highest / 2 - lowest / 2
    inverse, step = (127 / half).double(), (half / 127).double()
    zero = torch.round(-lowest * inverse)
    return (torch.round(rows * inverse + zero) - zero).nan_to_num() * step


def _as_int8(w: torch.Tensor) -> torch.Tensor:
    groups = [quantize_int8(group) for group in w.float().split(GROUP, -1)]
    return torch.cat([values.double() * scales.double()[:, None] for values, scales in groups], -1)


def adjusted_logits(
    logits: torch.Tensor,
    *,
    seen: dict[int, int] | None = None,
    repetition: float = 1.0,
    frequency: float = 0.0,
    presence: float = 0.0,
    bias: dict[int, float] | None = None,
    allowed: torch.Tensor | None = None,
) -> torch.Tensor:
    """One row ``[V]`` as ``ops.sampling.sample`` filters it, float32. ``seen``: id → how often it was generated."""
    out = logits.float().clone()
    for token, generated in (seen or {}).items():
        if generated:
            out[token] = out[token] - torch.tensor(frequency) * generated - torch.tensor(presence)
        out[token] = out[token] * torch.tensor(repetition) if out[token] < 0 else out[token] / torch.tensor(repetition)
    for token, value in (bias or {}).items():
        out[token] += value
    return out if allowed is None else out.masked_fill(~allowed, -math.inf)


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
