"""The launchers' part for the emulated attention and cache kernels, as ``calls`` is it for the others."""

from __future__ import annotations

from typing import Any

import torch

from tests.emulation.calls import UNWRITTEN, Call
from tests.emulation.harness import dtype_name

FURTHEST = 2**31 - 1
SPLIT = 512  # keys


def packed_attention(
    call: Call,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    *,
    rows_each: int = 4,
    split: bool = False,
    **options: Any,
) -> torch.Tensor:
    """``rows_each``: of a warp, 1 or more. ``split``: a thread block for each split."""
    return _attend(call, q, k, v, starts, None, None, q.shape[0], rows_each, split, options)


def paged_attention(
    call: Call,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    query_starts: torch.Tensor,
    kv_lengths: torch.Tensor,
    block_tables: torch.Tensor,
    *,
    rows_each: int = 4,
    split: bool = False,
    **options: Any,
) -> torch.Tensor:
    most = block_tables.shape[1] * k_cache.shape[1]
    return _attend(
        call, q, k_cache, v_cache, query_starts, kv_lengths, block_tables, most, rows_each, split, options
    )  # fmt: skip


def _attend(
    call: Call,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    kv_lengths: torch.Tensor | None,
    block_tables: torch.Tensor | None,
    most_keys: int,
    rows_each: int,
    split: bool,
    options: dict[str, Any],
) -> torch.Tensor:
    rows, heads, width = q.shape
    out = torch.full((rows, heads, v.shape[-1]), UNWRITTEN).to(q.dtype)
    splits = -(-most_keys // SPLIT) if split else 1
    parts = torch.full((splits, rows, heads, v.shape[-1] + 2), UNWRITTEN) if split else None
    paged = block_tables is not None
    integers = [
        rows, starts.shape[0] - 1, heads, k.shape[-2], width, v.shape[-1], q.stride(0), q.stride(1),
        k.stride(-3), k.stride(-2), k.stride(0) if paged else 0,
        v.stride(-3), v.stride(-2), v.stride(0) if paged else 0,
        block_tables.shape[1] if block_tables is not None else 0, k.shape[1] if paged else 0, k.shape[0],
        int(options.get("causal", True)), min(options.get("window_left", -1), FURTHEST),
        min(options.get("window_right", -1), FURTHEST), rows_each, splits,
    ]  # fmt: skip
    call(
        f"attention_{dtype_name(q)}", q, k, v, out, starts, kv_lengths, block_tables, options.get("sinks"), parts,
        torch.tensor(integers), float(options["scale"]), float(options.get("softcap", 0.0)),
    )  # fmt: skip
    return out


def store_kv(call: Call, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, *caches: torch.Tensor) -> None:
    rows = zip(caches, (k, v), strict=True)
    _copy(call, "store_kv", [(cache, row) for cache, row in rows], slots, slots.shape[0])


def copy_blocks(call: Call, k_cache: torch.Tensor, v_cache: torch.Tensor, pairs: torch.Tensor) -> None:
    _copy(call, "copy_blocks", [(k_cache, None), (v_cache, None)], pairs, pairs.shape[0])


def _copy(
    call: Call, name: str, tensors: list[tuple[torch.Tensor, torch.Tensor | None]], indexes: torch.Tensor, count: int
) -> None:
    cache = tensors[0][0]
    size, present = cache.element_size(), [t for pair in tensors for t in pair if t is not None]
    sizes = [n * size for t in present for n in (t.data_ptr() // size, t.shape[-1], *t.stride()[:-1])]
    unit = 16 if all(n % 16 == 0 for n in sizes) else size
    arguments: list[Any] = []
    for own, rows in tensors:
        strides = [own.stride(0), own.stride(1), own.stride(2), own.shape[2] * unit // size, own.shape[3]]
        more = [0, 0] if rows is None else [rows.stride(0), rows.stride(1)]
        arguments += [own, rows, torch.tensor([n * size // unit for n in (*strides, *more)])]
    call(f"{name}_{unit}", *arguments, indexes, count, cache.shape[0], cache.shape[1])
