"""Scores of chosen labels, over these alone or over the whole vocabulary, without the ``[R, V]`` matrix.

rows ``[R, H]`` and weight ``[V, H]`` share one dtype of float32, bfloat16, float16; bias ``[V]`` of any of these, or
None. label_ids int64 ``[N]``, those of row r at ``label_starts[r]:label_starts[r+1]`` (int32 ``[R+1]``). A raw product
is ``rows·weight + bias``; a logit is ``scale * raw``, then ``softcap * tanh(logit / softcap)`` where softcap > 0.
scale is 0 or of float32's normal range, softcap 0 or 1e-30 to 1e30. Sums are float32. A row's result does not depend on
the rows beside it. Bad arguments raise ``RuntimeError``.
"""

from __future__ import annotations

import torch

from pyruntime.ops import _library  # noqa: F401  registers the ops


def label_logits(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    label_ids: torch.Tensor,
    label_starts: torch.Tensor,
) -> torch.Tensor:
    """Raw products ``rows[r]·weight[label] + bias[label]`` → float32 ``[N]``."""
    out: torch.Tensor = torch.ops.pyruntime.label_logits(rows, weight, bias, label_ids, label_starts)
    return out


def logsumexp(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    softcap: float = 0.0,
    scale: float = 1.0,
) -> torch.Tensor:
    """log Σ_v exp(logit_v) → float32 ``[R]``, by tiles of the vocabulary.

    A row with a logit of NaN or +inf answers NaN; -inf adds nothing, and a row of -inf alone answers -inf.
    """
    out: torch.Tensor = torch.ops.pyruntime.logsumexp(rows, weight, bias, softcap, scale)
    return out


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
    """Softmax of logit / ``temperature[r]`` over the labels of each row alone → float32 ``[N]``.

    temperature float32 ``[R]``, > 0. Only the labels' rows of the matrix are read. A row whose logits are not finite
    answers NaN.
    """
    out: torch.Tensor = torch.ops.pyruntime.label_scores(
        rows, weight, bias, label_ids, label_starts, temperature, softcap=softcap, scale=scale
    )
    return out


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
    """exp(log-softmax over the whole vocabulary at each label) → float32 ``[N]``, the matrix read once, by tiles."""
    out: torch.Tensor = torch.ops.pyruntime.label_probabilities(
        rows, weight, bias, label_ids, label_starts, softcap=softcap, scale=scale
    )
    return out


def token_logprobs(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    token_ids: torch.Tensor,
    *,
    softcap: float = 0.0,
    scale: float = 1.0,
) -> torch.Tensor:
    """log-softmax over the whole vocabulary at ``token_ids[r]`` (int64 ``[R]``) → float32 ``[R]``, by tiles."""
    out: torch.Tensor = torch.ops.pyruntime.token_logprobs(rows, weight, bias, token_ids, softcap=softcap, scale=scale)
    return out
