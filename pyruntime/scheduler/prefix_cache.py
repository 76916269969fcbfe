"""Which full blocks hold the keys and values of which tokens, so that a later prompt need not compute them.

A tree by exact tokens, not by hash: a node is (parent node, the block's tokens), so two prompts share a
block only if all tokens up to its end are equal. Keeps no block alive by itself: an unused block stays
until ``BlockPool`` needs it, the least recently used first.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Tokens

from pyruntime.scheduler.blocks import BlockPool

ROOT = 0


class PrefixCache:
    """Matches prompts against blocks that were computed before, in one pool of one model."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._entries: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}  # key → (node, block)
        self._key_of: dict[int, tuple[int, tuple[int, ...]]] = {}  # block → key
        self._nodes = itertools.count(ROOT + 1)
        pool.on_reuse = self._forget

    def __len__(self) -> int:
        """Blocks that a later prompt could match."""
        return len(self._entries)

    def match(self, token_ids: Tokens[int], most: int) -> tuple[list[int], list[int]]:
        """(nodes, blocks) of the longest known prefix of at most ``most`` tokens; takes no reference."""
        size, node = self._pool.block_size, ROOT
        nodes: list[int] = []
        blocks: list[int] = []
        for start in range(0, most - size + 1, size):
            entry = self._entries.get((node, tuple(token_ids[start : start + size])))
            if entry is None:
                break
            node, block = entry
            nodes.append(node)
            blocks.append(block)
        return nodes, blocks

    def insert(self, token_ids: Tokens[int], nodes: list[int], blocks: list[int], num_computed: int) -> None:
        """Make the full blocks among ``num_computed`` tokens known. ``nodes``: those already known; extended here."""
        size = self._pool.block_size
        for place in range(len(nodes), num_computed // size):
            key = (nodes[-1] if nodes else ROOT, tuple(token_ids[place * size : (place + 1) * size]))
            entry = self._entries.get(key)
            if entry is None:
                entry = next(self._nodes), blocks[place]
                self._entries[key] = entry
                self._key_of[blocks[place]] = key
                self._pool.keep(blocks[place])
            nodes.append(entry[0])

    def _forget(self, block: int) -> None:
        """The pool gives the block to somebody else. What lies behind it can no longer be reached and ages out."""
        del self._entries[self._key_of.pop(block)]
