"""Every live sequence, the state it is in, and the moves from one state to another.

Moves alone: which sequence moves when is the policy's business, in ``scheduler.py``.
"""

from __future__ import annotations

from collections import Counter

from pyruntime.scheduler.groups import PrefixGroups
from pyruntime.scheduler.memory import Memory
from pyruntime.scheduler.plan import StepPlan
from pyruntime.scheduler.queue import WaitingQueue
from pyruntime.scheduler.sequence import Sequence, State
from pyruntime.scheduler.sharing import Shared
from pyruntime.types import Task


class Population:
    """The sequences of one scheduler. Blocks and queue entries follow every move."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.queue = WaitingQueue()
        self.running: set[Sequence] = set()
        self.paused: set[Sequence] = set()
        self.holding: set[Sequence] = set()
        self.num_running: Counter[Task] = Counter()
        self.num_set_back = 0  # since the start
        self.groups: PrefixGroups | None = None
        if memory.pool is not None and memory.cache is not None:
            self.groups = PrefixGroups(memory.cache, memory.pool.block_size, self.queue.unpark)

    # -- from outside -----------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queued, or PENDING until its parent's prompt is computed."""
        if sequence.parent is None:
            self.queue.enter(sequence)
        else:
            sequence.parent.children.append(sequence)
            sequence.parent.num_unforked += 1
            self.queue.expect(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Its blocks go back, unless children still fork from them."""
        if sequence.state is State.FINISHED:
            return
        unborn = sequence.state in (State.PENDING, State.WAITING) or sequence.num_computed < sequence.num_prompt
        self._remove(sequence)
        if sequence.num_unforked > 0 and not unborn:
            self.hold(sequence)
            return
        self.leave_parent(sequence)
        self._end(sequence)
        self.free_children(sequence)

    def pause(self, sequence: Sequence) -> None:
        """A sequence that waits or runs leaves queue or batch and keeps its blocks; in other states nothing changes."""
        if sequence.state in (State.WAITING, State.RUNNING):
            self._remove(sequence)
            sequence.state = State.PAUSED
            self.paused.add(sequence)

    def resume(self, sequence: Sequence) -> None:
        """A paused sequence goes on where it was, or queues to be computed anew if its blocks were taken."""
        if sequence.state is not State.PAUSED:
            return
        self.paused.discard(sequence)
        if sequence.num_computed or sequence.blocks:
            self._enter_batch(sequence)
        else:
            self.queue.enter(sequence)

    # -- from the policy --------------------------------------------------------------------------

    def start(self, sequence: Sequence, shared: Shared, plan: StepPlan) -> None:
        """From the queue into the batch, on the blocks that it shares."""
        self._remove(sequence)
        self.memory.take(sequence, shared, plan)
        sequence.num_computed = shared.num_tokens
        if sequence.num_starts == 0:  # what a sequence finds of its own after it was set back, nobody was spared
            sequence.cached_tokens = self._cached_tokens(sequence, shared)
        sequence.num_starts += 1
        self.leave_parent(sequence)
        self._enter_batch(sequence)
        if self.groups is not None:
            self.groups.lead(sequence)

    def set_back(self, sequence: Sequence) -> None:
        """It gives its blocks up and queues again; its tokens, generated ones too, are computed anew later.

        A paused one loses its blocks and stays paused; in states without blocks of their own nothing changes.
        """
        if sequence.state not in (State.RUNNING, State.PAUSED):
            return
        self.num_set_back += bool(sequence.blocks)
        was_running = sequence.state is State.RUNNING
        if was_running:
            self._remove(sequence)
        self.memory.release(sequence)
        sequence.num_computed = 0
        sequence.cache_nodes = []
        sequence.partial_hidden.clear()
        if was_running:
            self.queue.enter(sequence)

    def step_over(self, sequence: Sequence, num_tokens: int) -> None:
        """A step computed ``num_tokens`` of a running sequence: children may fork, an exhausted prefix is held."""
        sequence.num_computed += num_tokens
        self.memory.settle(sequence)
        if self.groups is not None:
            self.groups.progress(sequence)
        if sequence.children and sequence.num_computed >= sequence.num_prompt:
            self.free_children(sequence)
        if sequence.is_prefix and sequence.num_remaining == 0:
            self._remove(sequence)
            self.hold(sequence)

    def free_held(self, wanted: int, keep: Sequence | None = None) -> None:
        """Until ``wanted`` blocks are free, those held for children go; these then compute the prefix themselves."""
        for holder in sorted(self.holding, reverse=True):
            if wanted <= self.memory.num_free:
                return
            if holder is not keep:
                self.holding.discard(holder)
                self._end(holder)

    def free_paused(self, wanted: int, keep: Sequence | None = None) -> None:
        """Until ``wanted`` blocks are free, paused sequences lose theirs, the lowest rank first."""
        for sequence in sorted(self.paused, reverse=True):
            if wanted <= self.memory.num_free:
                return
            if sequence is not keep:
                self.set_back(sequence)

    def hold(self, sequence: Sequence) -> None:
        sequence.state = State.HOLDING
        self.holding.add(sequence)
        if sequence.num_unforked == 0:
            self.finish(sequence)

    def leave_parent(self, sequence: Sequence) -> None:
        """One child fewer for its parent to wait for; a parent held for this child alone is done."""
        parent, sequence.parent = sequence.parent, None
        if parent is None or parent.num_unforked == 0:
            return
        parent.num_unforked -= 1
        if parent.num_unforked == 0 and parent.state is State.HOLDING:
            self.holding.discard(parent)
            self._end(parent)

    def free_children(self, sequence: Sequence) -> None:
        """The children wait in the queue now, to fork from the prompt or to compute it themselves."""
        children, sequence.children = sequence.children, []
        for child in children:
            if child.state is State.PENDING:
                self.queue.enter(child)

    # -- parts of moves ---------------------------------------------------------------------------

    def _cached_tokens(self, sequence: Sequence, shared: Shared) -> int:
        parent = sequence.parent
        if parent is not None and parent.is_prefix and sequence.index == 0:
            # The first item behind a prefix pays for it, so that prompt minus cached tokens is the work done.
            return min(parent.cached_tokens, shared.num_tokens)
        return shared.num_tokens

    def _enter_batch(self, sequence: Sequence) -> None:
        sequence.state = State.RUNNING
        self.running.add(sequence)
        self.num_running[sequence.task] += 1

    def _remove(self, sequence: Sequence) -> None:
        """Out of queue, batch and sets; the state is the caller's to set."""
        if sequence.state is State.WAITING:
            self.queue.leave(sequence)
        elif sequence.state is State.PENDING:
            self.queue.forget(sequence)
        elif sequence.state is State.RUNNING:
            self.running.discard(sequence)
            self.num_running[sequence.task] -= 1
            if self.groups is not None:
                self.groups.leave(sequence)
        self.paused.discard(sequence)
        self.holding.discard(sequence)

    def _end(self, sequence: Sequence) -> None:
        sequence.state = State.FINISHED
        self.memory.release(sequence)
        sequence.partial_hidden.clear()
