"""Which full blocks hold the keys and values of which tokens, so that a later prompt need not compute them.

A tree by exact tokens, not by hash: a node is (parent node, the block's tokens), so two prompts share a
block only if all tokens up to its end are equal. At the root stands the sequence's salt in place of a parent
node. Keeps no block alive by itself: an unused block stays until ``BlockPool`` needs it, the least recently
used first.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Tokens

from pyruntime.scheduler.blocks import BlockPool

# (parent node, or the salt; tokens of the block)
Key = tuple[int | str | bytes, tuple[int, ...]]


class PrefixCache:
    """Matches prompts against blocks that were computed before, in one pool of one model."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._entries: dict[Key, tuple[int, int]] = {}  # key → (node, block)
        self._key_of: dict[int, Key] = {}  # block → key
        self._nodes = itertools.count(1)
        pool.on_reuse = self._forget

    def __len__(self) -> int:
        """Blocks that a later prompt could match."""
        return len(self._entries)

    def match(self, token_ids: Tokens[int], most: int, salt: str | bytes = "") -> tuple[list[int], list[int]]:
        """(nodes, blocks) of the longest known prefix of at most ``most`` tokens; takes no reference."""
        size = self._pool.block_size
        nodes: list[int] = []
        blocks: list[int] = []
        for place in range(most // size):
            entry = self._entries.get(self.key(token_ids, nodes, place, salt))
            if entry is None:
                break
            nodes.append(entry[0])
            blocks.append(entry[1])
        return nodes, blocks

    def insert(
        self, token_ids: Tokens[int], nodes: list[int], blocks: list[int], num_computed: int, salt: str | bytes = ""
    ) -> None:
        """Make the full blocks among ``num_computed`` tokens known. ``nodes``: those already known; extended here."""
        for place in range(len(nodes), num_computed // self._pool.block_size):
            key = self.key(token_ids, nodes, place, salt)
            entry = self._entries.get(key)
            if entry is None:
                entry = next(self._nodes), blocks[place]
                self._entries[key] = entry
                self._key_of[blocks[place]] = key
                self._pool.keep(blocks[place])
            nodes.append(entry[0])

    def forget(self, token_ids: Tokens[int], nodes: list[int], salt: str | bytes = "") -> None:
        """Nothing matches the blocks of ``nodes``, or what lies behind them, any more."""
        for place in range(len(nodes)):
            entry = self._entries.pop(self.key(token_ids, nodes, place, salt), None)
            if entry is not None:
                del self._key_of[entry[1]]
                self._pool.unkeep(entry[1])

    def key(self, token_ids: Tokens[int], nodes: list[int], place: int, salt: str | bytes) -> Key:
        """Of the full block at ``place``, when ``nodes`` are those of the blocks before it."""
        size = self._pool.block_size
        return (nodes[place - 1] if place else salt, tuple(token_ids[place * size : (place + 1) * size]))

    def _forget(self, block: int) -> None:
        """The pool gives the block to somebody else. What lies behind it can no longer be reached and ages out."""
        del self._entries[self._key_of.pop(block)]
