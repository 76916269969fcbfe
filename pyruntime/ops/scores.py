"""Logits of chosen labels, and the normaliser of the whole vocabulary, without the ``[R, V]`` matrix.

rows ``[R, H]`` and weight ``[V, H]`` share one dtype of float32, bfloat16, float16; bias ``[V]`` of any of these, or
None. Sums are float32. A row's result does not depend on the rows beside it. Bad arguments raise ``RuntimeError``.
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
    """Raw logits ``rows[r]·weight[label] + bias[label]`` → float32 ``[N]``.

    label_ids int64 ``[N]``, those of row r at ``label_starts[r]:label_starts[r+1]`` (int32 ``[R+1]``).
    """
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

    logit = ``scale * (rows·weight + bias)``, then ``softcap * tanh(logit / softcap)`` where softcap > 0.
    """
    out: torch.Tensor = torch.ops.pyruntime.logsumexp(rows, weight, bias, softcap, scale)
    return out
