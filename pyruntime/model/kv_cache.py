"""The paged key/value cache: for every layer two tensors [blocks, block_size, kv_heads, width]."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch

from pyruntime.config_values import Share
from pyruntime.errors import ModelLoadError
from pyruntime.machine import free_memory
from pyruntime.ops import cache as cache_ops


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Key/value geometry of one layer, as the probe forward saw it."""

    num_kv_heads: int
    key_width: int
    value_width: int

    @property
    def elements_per_token(self) -> int:
        return self.num_kv_heads * (self.key_width + self.value_width)


class KVCache:
    """Allocated and written once at load, so that its memory is there; which block holds what the scheduler says.

    One block more than it is asked for, where rows of padding write (``scheduler/step_shapes.py``), if ``has_spare``.
    """

    _alive: weakref.WeakSet[KVCache] = weakref.WeakSet()

    def __init__(
        self,
        layers: dict[int, LayerShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: str,
        has_spare: bool = False,
    ) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.device = device
        self.has_spare = has_spare
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}
        for index, shape in layers.items():
            rows = (num_blocks + has_spare, block_size, shape.num_kv_heads)
            self.keys[index] = torch.zeros(*rows, shape.key_width, dtype=dtype, device=device)
            self.values[index] = torch.zeros(*rows, shape.value_width, dtype=dtype, device=device)
        KVCache._alive.add(self)

    @property
    def num_bytes(self) -> int:
        """Over all layers."""
        return sum(tensor.nbytes for tensor in (*self.keys.values(), *self.values.values()))

    @classmethod
    def bytes_on(cls, device: str) -> int:
        """What all caches of the process take of a device."""
        return sum(cache.num_bytes for cache in cls._alive if cache.device == device)

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        """Write key/value rows [T, kv_heads, width] into their slots (block * block_size + offset)."""
        cache_ops.store_kv(key, value, slots, self.keys[layer], self.values[layer])

    def copy_blocks(self, pairs: torch.Tensor) -> None:
        """Copy whole blocks, (source, target) pairs int64 [C, 2], in every layer."""
        for layer in self.keys:
            cache_ops.copy_blocks(self.keys[layer], self.values[layer], pairs)


def bytes_for_cache(budget: int | Share, device: str, num_sharing: int | None) -> int:
    """Bytes for the cache of a model whose weights are loaded, measured now.

    ``budget``: bytes, or a share of the device's memory that weights leave. ``num_sharing``: this model and those after
    it that divide one share. The caches before this one are part of it, and the rest of it is divided evenly, so that
    the last model gets what encoders, which have no cache, did not take. None: this model does not divide with others,
    its share is of what is free now. Raises ``ModelLoadError`` when the memory is not there.
    """
    free = free_bytes(device)
    if isinstance(budget, int):
        if budget > free:
            raise ModelLoadError(f"kv_cache_bytes: {budget} bytes are not there; free after the weights: {free}")
        return budget
    taken = KVCache.bytes_on(device) if num_sharing is not None else 0
    return max(0, int((free + taken) * budget.percent / 100) - taken) // (num_sharing or 1)


def free_bytes(device: str) -> int:
    """Bytes that can still be allocated on a device, those that torch keeps from earlier tensors included."""
    if not device.startswith("cuda"):
        return free_memory()
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


def blocks_in_budget(layers: dict[int, LayerShape], block_size: int, dtype: torch.dtype, num_bytes: int) -> int:
    """How many blocks fit into ``num_bytes`` over all layers."""
    element_size = torch.empty((), dtype=dtype).element_size()
    block_bytes = block_size * element_size * sum(shape.elements_per_token for shape in layers.values())
    return num_bytes // block_bytes
