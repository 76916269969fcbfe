"""Draws next tokens from rows of logits."""

from __future__ import annotations

from typing import NamedTuple

import torch

from pyruntime.ops import _library  # noqa: F401  registers the ops


class Sampled(NamedTuple):
    """ids int64 ``[B]``, logprobs float32 ``[B]``, top_ids int64 and top_logprobs float32 ``[B, top]``."""

    ids: torch.Tensor
    logprobs: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    indices: torch.Tensor,
    *,
    repetition: torch.Tensor | None = None,
    frequency: torch.Tensor | None = None,
    presence: torch.Tensor | None = None,
    seen_ids: torch.Tensor | None = None,
    seen_generated: torch.Tensor | None = None,
    seen_starts: torch.Tensor | None = None,
    bias_ids: torch.Tensor | None = None,
    bias_values: torch.Tensor | None = None,
    bias_starts: torch.Tensor | None = None,
    bitmask: torch.Tensor | None = None,
) -> torch.Tensor:
    """One token id a row → int64 ``[B]``; -1 where the row holds NaN or +inf, or nothing above -inf is left.

    logits ``[B, V]`` of float32, bfloat16 or float16, V < 2^20. Per row, all ``[B]``: temperature float32 ≥ 0 (0: the
    largest logit, lowest id on ties), top_k int32 (≤ 0 off), top_p float32 in (0, 1], min_p float32 in [0, 1], and
    seeds int64 (read as uint64 bits), positions int64, indices int32, of which the draw is a function (Philox4x32-10).

    First, in this order: of the tokens seen, ``seen_ids`` int64 ``[M]`` (row r's, ascending, at
    ``seen_starts[r]:seen_starts[r+1]``, int32 ``[B+1]``), logit − frequency·seen_generated − presence for those
    generated (``seen_generated`` int32 ``[M]``, 0: in the prompt alone), then logit·repetition if negative, else
    logit/repetition (> 0), all float32 ``[B]``; logit + ``bias_values`` float32 ``[K]`` (finite or -inf) of
    ``bias_ids`` (``bias_starts``, likewise); -inf where the bit of ``bitmask`` int32 ``[B, ceil(V/32)]`` (token v: bit
    v % 32 of word v // 32) is not set.

    Then, each on what the one before kept, renormalised: division by the temperature; top_k keeps exactly k; top_p the
    smallest set of highest probability whose mass is ≥ p; min_p those of at least min_p times the highest probability.
    Equal probabilities are taken by lower id. Masses are exact sums of integers, so the token is the same on CPU and
    CUDA for the same float32 logits, and does not depend on its neighbours or on the number of threads. Tokens less
    probable than 2^-44 of the most probable one are never drawn.

    Bad shapes and dtypes raise ``RuntimeError``. On the CPU bad values (a temperature below 0, …) do too; on CUDA,
    where nothing is read back to check them, a row of bad parameters answers -1 instead, with NaN logprobs.
    """
    ids: torch.Tensor = torch.ops.pyruntime.sample(
        logits, temperature, top_k, top_p, min_p, seeds, positions, indices, repetition=repetition,
        frequency=frequency, presence=presence, seen_ids=seen_ids, seen_generated=seen_generated,
        seen_starts=seen_starts, bias_ids=bias_ids, bias_values=bias_values, bias_starts=bias_starts, bitmask=bitmask,
    )[0]  # fmt: skip
    return ids


def sample_with_logprobs(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    indices: torch.Tensor,
    *,
    top: int = 0,
    **extras: torch.Tensor | None,
) -> Sampled:
    """``sample`` and logprobs of the raw distribution (before penalties, bias, mask, temperature and filters).

    ``top`` in 0..min(V, 1024): how many of the most probable tokens to list, most probable first, ties by lower id. A
    row without an answer (id -1) has NaN logprobs and top_ids -1. ``extras``: the keywords of ``sample``.
    """
    answers = torch.ops.pyruntime.sample(
        logits, temperature, top_k, top_p, min_p, seeds, positions, indices, **extras, top_logprobs=top
    )
    return Sampled(*answers)
