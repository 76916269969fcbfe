"""Draws next tokens from rows of logits."""

from __future__ import annotations

import torch

from pyruntime.ops import _library  # noqa: F401  registers the ops


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    indices: torch.Tensor,
) -> torch.Tensor:
    """One token id a row → int64 ``[B]``; -1 where the row holds NaN or +inf, or nothing but -inf.

    logits ``[B, V]`` of float32, bfloat16 or float16. Per row, all ``[B]``: temperature float32 ≥ 0 (0: the largest
    logit, lowest id on ties), top_k int32 (≤ 0 off), top_p float32 in (0, 1], min_p float32 in [0, 1], and seeds int64
    (read as uint64 bits), positions int64, indices int32, of which the draw is a function (Philox4x32-10).

    In this order, each on what the one before kept, renormalised: top_k keeps exactly k; top_p the smallest set of
    highest probability whose mass is ≥ p; min_p those of at least min_p times the highest probability. Equal
    probabilities are taken by lower id. Masses sum in float64. A row's token does not depend on its neighbours or on
    the number of threads. Bad arguments raise ``RuntimeError``.
    """
    out: torch.Tensor = torch.ops.pyruntime.sample(logits, temperature, top_k, top_p, min_p, seeds, positions, indices)
    return out
