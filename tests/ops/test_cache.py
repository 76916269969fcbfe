"""Writes into the paged cache: every slot, nothing else, nothing at all on bad input."""

from __future__ import annotations

import pytest
import torch

from pyruntime.ops import cache


@pytest.mark.parametrize("size", [1, 16, 17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_store_writes_the_slots_alone(size: int, dtype: torch.dtype) -> None:
    k_cache, v_cache = torch.zeros(5, size, 2, 8, dtype=dtype), torch.zeros(5, size, 2, 6, dtype=dtype)
    slots = torch.randperm(5 * size)[: 3 * size]
    k = torch.randn(2, 3 * size, 8).to(dtype).transpose(0, 1)
    v = torch.randn(3 * size, 2, 6).to(dtype)
    cache.store_kv(k, v, slots, k_cache, v_cache)
    want_k, want_v = torch.zeros(5 * size, 2, 8, dtype=dtype), torch.zeros(5 * size, 2, 6, dtype=dtype)
    want_k[slots], want_v[slots] = k, v
    assert torch.equal(k_cache.flatten(0, 1), want_k) and torch.equal(v_cache.flatten(0, 1), want_v)


def test_store_into_a_strided_cache() -> None:
    both = torch.zeros(4, 3, 2, 2, 8)  # keys and values of a block beside each other
    k_cache, v_cache = both[:, :, 0], both[:, :, 1]
    k, v = torch.randn(2, 2, 8), torch.randn(2, 2, 8)
    cache.store_kv(k, v, torch.tensor([4, 11]), k_cache, v_cache)
    assert torch.equal(k_cache[1, 1], k[0]) and torch.equal(v_cache[3, 2], v[1])
    assert both.count_nonzero() == 2 * 2 * 2 * 8


def test_copy_blocks_in_order() -> None:
    k_cache, v_cache = torch.randn(4, 3, 2, 8), torch.randn(4, 3, 2, 8)
    k, v = k_cache.clone(), v_cache.clone()
    cache.copy_blocks(k_cache, v_cache, torch.tensor([[0, 2], [2, 3], [1, 1]]))
    assert torch.equal(k_cache, k[[0, 1, 0, 0]]) and torch.equal(v_cache, v[[0, 1, 0, 0]])


@pytest.mark.parametrize("slot", [-1, 12])
def test_bad_slot_raises_and_writes_nothing(slot: int) -> None:
    caches = torch.zeros(4, 3, 1, 8), torch.zeros(4, 3, 1, 8)
    rows = torch.ones(2, 1, 8)
    with pytest.raises(RuntimeError, match="slot_mapping: entry 1"):
        cache.store_kv(rows, rows, torch.tensor([0, slot]), *caches)
    assert not caches[0].any() and not caches[1].any()


def test_bad_arguments_raise() -> None:
    caches, rows, slots = (torch.zeros(4, 3, 1, 8), torch.zeros(4, 3, 1, 8)), torch.ones(2, 1, 8), torch.tensor([0, 1])
    with pytest.raises(RuntimeError, match="k: expected the dtype"):
        cache.store_kv(rows.half(), rows, slots, *caches)
    with pytest.raises(RuntimeError, match="v: expected shape"):
        cache.store_kv(rows, rows[:1], slots, *caches)
    with pytest.raises(RuntimeError, match="slot_mapping: expected dtype"):
        cache.store_kv(rows, rows, slots.int(), *caches)
    with pytest.raises(RuntimeError, match="pairs: entry"):
        cache.copy_blocks(*caches, torch.tensor([[0, 4]]))
