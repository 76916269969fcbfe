"""The paged key/value cache: for every layer two tensors [blocks, block_size, kv_heads, width]."""

from __future__ import annotations

from dataclasses import dataclass

import torch

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
    """Allocated once at load; which block holds what is the scheduler's business."""

    def __init__(
        self, layers: dict[int, LayerShape], num_blocks: int, block_size: int, dtype: torch.dtype, device: str
    ) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}
        for index, shape in layers.items():
            rows = (num_blocks, block_size, shape.num_kv_heads)
            self.keys[index] = torch.zeros(*rows, shape.key_width, dtype=dtype, device=device)
            self.values[index] = torch.zeros(*rows, shape.value_width, dtype=dtype, device=device)

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        """Write key/value rows [T, kv_heads, width] into their slots (block * block_size + offset)."""
        cache_ops.store_kv(key, value, slots, self.keys[layer], self.values[layer])

    def copy_blocks(self, pairs: torch.Tensor) -> None:
        """Copy whole blocks, (source, target) pairs int64 [C, 2], in every layer."""
        for layer in self.keys:
            cache_ops.copy_blocks(self.keys[layer], self.values[layer], pairs)


def blocks_in_budget(layers: dict[int, LayerShape], block_size: int, dtype: torch.dtype, num_bytes: int) -> int:
    """How many blocks fit into ``num_bytes`` over all layers."""
    element_size = torch.empty((), dtype=dtype).element_size()
    block_bytes = block_size * element_size * sum(shape.elements_per_token for shape in layers.values())
    return num_bytes // block_bytes
