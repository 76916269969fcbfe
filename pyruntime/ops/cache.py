"""Writes into the paged key/value cache, in place. Bad arguments raise ``RuntimeError`` and write nothing."""

from __future__ import annotations

import torch

from pyruntime.ops import _library  # noqa: F401  registers the ops


def store_kv(
    k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor
) -> None:
    """k ``[T, Hk, D]``, v ``[T, Hk, Dv]`` into the slots int64 ``[T]`` of the caches ``[N, B, Hk, ·]``.

    Slot s is offset ``s % B`` of block ``s // B``. Rows and cache share one dtype.
    """
    torch.ops.pyruntime.store_kv(k, v, slot_mapping, k_cache, v_cache)


def copy_blocks(k_cache: torch.Tensor, v_cache: torch.Tensor, pairs: torch.Tensor) -> None:
    """Copies whole blocks, pairs int64 ``[C, 2]`` of (source, target), one pair after the other."""
    torch.ops.pyruntime.copy_blocks(k_cache, v_cache, pairs)
