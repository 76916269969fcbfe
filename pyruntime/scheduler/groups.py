"""Prompts that share a prefix run together: one computes it, the others wait until its blocks are known.

Without this, prompts that arrive in the same moment all compute the prefix, since none finds it in the cache yet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from pyruntime.scheduler.prefix_cache import Key, PrefixCache
from pyruntime.scheduler.sequence import Sequence
from pyruntime.scheduler.sharing import Shared

# Waiting a step is worth it when this many tokens are spared, or half of the sequence's own work.
WORTH_TOKENS = 256
# A sequence waits for others at most this many steps from the first time on, then it computes for itself.
MAX_STEPS = 64


class PrefixGroups:
    """``unpark`` puts a sequence that waited here back into the queue's order.

    A sequence that computes a prompt (a leader) is found by the key of the block that it computes next. Others wait
    for it only if it ranks before them: its task and class then get on at least as well as theirs.
    """

    def __init__(self, cache: PrefixCache, block_size: int, unpark: Callable[[Sequence], None]) -> None:
        self._cache = cache
        self._block_size = block_size
        self._unpark = unpark
        self._leaders: dict[Key, Sequence] = {}
        self._keys: dict[Sequence, Key] = {}
        self._followers: dict[Sequence, list[tuple[int, Sequence]]] = {}  # leader → (blocks awaited, follower)
        self._waits: deque[tuple[int, Sequence]] = deque()  # (step, follower), in order
        self._step = 0

    def begin(self) -> None:
        """A step starts; those that waited too long go back to the queue."""
        self._step += 1
        while self._waits and self._waits[0][0] + MAX_STEPS <= self._step:
            follower = self._waits.popleft()[1]
            follower.joins_groups = False
            self._unpark(follower)

    def joins(self, sequence: Sequence, shared: Shared) -> bool:
        """Whether the sequence now waits for a leader; if so the caller parks it."""
        if sequence.parent is not None or not (sequence.reuses_prefix and sequence.joins_groups):
            return False
        key = self._next_key(sequence, shared.nodes, len(sequence) - 1)
        leader = self._leaders.get(key) if key is not None else None
        if leader is None or not leader < sequence:
            return False
        known = len(shared.nodes)
        common = self._num_common(leader, sequence, known)
        spared = (common - known) * self._block_size
        if spared < min(WORTH_TOKENS, (len(sequence) - known * self._block_size) / 2):
            return False
        self._followers.setdefault(leader, []).append((common, sequence))
        self._waits.append((self._step, sequence))
        return True

    def lead(self, sequence: Sequence) -> None:
        """The sequence starts on its prompt and is found by the block that it computes next."""
        key = self._next_key(sequence, sequence.cache_nodes, len(sequence)) if sequence.reuses_prefix else None
        if key is not None:
            self._leaders[key] = sequence
            self._keys[sequence] = key

    def progress(self, sequence: Sequence) -> None:
        """A step computed some of the sequence's tokens: followers whose blocks are known now go on."""
        if sequence not in self._keys:
            return
        self._forget_key(sequence)
        self.lead(sequence)
        known = len(sequence.cache_nodes) if sequence in self._keys else len(sequence)
        self._release(sequence, known)

    def leave(self, sequence: Sequence) -> None:
        """The sequence computes no more, for whatever reason; those that waited for it go on without."""
        self._forget_key(sequence)
        self._release(sequence, len(sequence))

    def _release(self, leader: Sequence, known: int) -> None:
        waiting = self._followers.pop(leader, [])
        for needed, follower in waiting:
            if needed <= known:
                self._unpark(follower)
        if rest := [entry for entry in waiting if entry[0] > known]:
            self._followers[leader] = rest
        if not self._followers:
            self._waits.clear()

    def _forget_key(self, sequence: Sequence) -> None:
        key = self._keys.pop(sequence, None)
        if key is not None and self._leaders.get(key) is sequence:
            del self._leaders[key]

    def _next_key(self, sequence: Sequence, nodes: list[int], most: int) -> Key | None:
        """Of the first full block within ``most`` tokens that is not known; None when there is none."""
        if (len(nodes) + 1) * self._block_size > most:
            return None
        return self._cache.key(sequence.token_ids, nodes, len(nodes), sequence.cache_salt)

    def _num_common(self, leader: Sequence, follower: Sequence, known: int) -> int:
        """Full blocks of equal tokens, of which the first ``known`` need no look; never the follower's last token."""
        size = self._block_size
        most = min(len(leader), len(follower) - 1) // size
        for place in range(known, most):
            start = place * size
            if leader.token_ids[start : start + size] != follower.token_ids[start : start + size]:
                return place
        return most
