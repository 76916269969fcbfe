"""Key/value block accounting: which cache blocks are free and how many sequences share each.

Pure bookkeeping, no tensors: block ids index the cache that ``model/kv_cache.py`` holds.
"""

from __future__ import annotations

from collections.abc import Callable


class OutOfBlocks(Exception):
    """Not enough free blocks; the scheduler preempts or waits."""


class BlockPool:
    """Reference-counted blocks of ``block_size`` tokens each.

    A block that ``keep`` was called for keeps its contents when its last reference goes: it counts as
    free, is handed out only after the plain free ones, least recently used first, and ``on_reuse``
    hears of that. ``share`` brings it back to life before.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references = [0] * num_blocks
        self._kept: set[int] = set()
        self._idle: dict[int, None] = {}  # kept and without reference, the longest idle first
        self.on_reuse: Callable[[int], None] = lambda block: None

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._idle)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        """Free blocks that hold something worth keeping."""
        return len(self._idle)

    @property
    def num_tokens(self) -> int:
        """Tokens that the whole pool can hold."""
        return self.num_blocks * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens occupy."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """``count`` blocks with one reference each, or ``OutOfBlocks`` and nothing taken."""
        if count > self.num_free:
            raise OutOfBlocks(f"{count} blocks wanted, {self.num_free} free")
        blocks = [self._free.pop() if self._free else self._reuse_idle() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def share(self, blocks: list[int]) -> list[int]:
        """Another reference to each of ``blocks``; returns a new list of the same ids."""
        for block in blocks:
            if self._references[block] < 1 and block not in self._idle:
                raise ValueError(f"block {block} is free and cannot be shared")
            self._idle.pop(block, None)
            self._references[block] += 1
        return list(blocks)

    def release(self, blocks: list[int]) -> None:
        """Drop one reference of each; a block without references is free again."""
        for block in reversed(blocks):  # of kept ones the end of a prefix goes idle, and so away, before its beginning
            if self._references[block] < 1:
                raise ValueError(f"block {block} was released twice")
            self._references[block] -= 1
            if self._references[block] == 0 and block in self._kept:
                self._idle[block] = None
            elif self._references[block] == 0:
                self._free.append(block)

    def keep(self, block: int) -> None:
        """From now on the block's contents are worth keeping when nobody uses it."""
        self._kept.add(block)

    def unkeep(self, block: int) -> None:
        """The block's contents are not worth keeping any more; ``on_reuse`` does not hear of it."""
        self._kept.discard(block)
        if block in self._idle:
            del self._idle[block]
            self._free.append(block)

    def num_idle(self, blocks: list[int]) -> int:
        """How many of ``blocks`` count as free although they hold something worth keeping."""
        return sum(block in self._idle for block in blocks)

    def _reuse_idle(self) -> int:
        block = next(iter(self._idle))
        del self._idle[block]
        self._kept.discard(block)
        self.on_reuse(block)
        return block
