"""Key/value block accounting: which cache blocks are free and how many sequences share each.

Pure bookkeeping, no tensors: block ids index the cache that ``model/kv_cache.py`` holds.
"""

from __future__ import annotations


class OutOfBlocks(Exception):
    """Not enough free blocks; the scheduler preempts or waits."""


class BlockPool:
    """Reference-counted blocks of ``block_size`` tokens each."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def num_tokens(self) -> int:
        """Tokens that the whole pool can hold."""
        return self.num_blocks * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens occupy."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """``count`` blocks with one reference each, or ``OutOfBlocks`` and nothing taken."""
        if count > len(self._free):
            raise OutOfBlocks(f"{count} blocks wanted, {len(self._free)} free")
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def share(self, blocks: list[int]) -> list[int]:
        """Another reference to each of ``blocks``; returns a new list of the same ids."""
        for block in blocks:
            if self._references[block] < 1:
                raise ValueError(f"block {block} is free and cannot be shared")
            self._references[block] += 1
        return list(blocks)

    def release(self, blocks: list[int]) -> None:
        """Drop one reference of each; a block without references is free again."""
        for block in blocks:
            if self._references[block] < 1:
                raise ValueError(f"block {block} was released twice")
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free.append(block)
