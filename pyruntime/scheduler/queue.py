"""Who waits, and in which order: one heap a task, ordered by a rank that does not change while a sequence waits."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Iterable

from pyruntime.scheduler.sequence import Rank, Sequence, State
from pyruntime.types import Task

# A heap is rebuilt when more than half of it, and more than these, are entries of sequences that left.
FEW_STALE = 64


class Ranking:
    """Priority classes that age: every ``ageing_s`` seconds of waiting are worth one class; 0 makes classes strict.

    Of two sequences that wait, the one with arrival time t and priority p goes first whose t - p·ageing_s is less.
    Waiting adds the same to all, so it cancels out: a rank is fixed at arrival. A sequence thus waits for higher
    classes only if they arrived before it or at most (difference of classes)·ageing_s after it, and for its own
    class in order of arrival. A preempted sequence keeps its rank.
    """

    def __init__(self, ageing_s: float = 0.0) -> None:
        self._ageing_s = ageing_s
        self._arrivals = itertools.count()

    def assign(self, sequences: Iterable[Sequence], now: float) -> None:
        """Ranks for the sequences of one request that arrived at ``now``; later calls need a later or equal time."""
        arrival = next(self._arrivals)
        for sequence in sequences:
            sequence.arrival = arrival
            level, age = -sequence.priority, 0.0
            if self._ageing_s > 0:
                level, age = 0, now - sequence.priority * self._ageing_s
            sequence.rank = (level, age, arrival, sequence.index)


class WaitingQueue:
    """Sequences in state WAITING, and how many tokens are yet to be computed for those and for PENDING ones.

    ``park`` takes a sequence out of the order while it goes on waiting, ``unpark`` puts it back.
    """

    def __init__(self) -> None:
        self._heaps: dict[Task, list[tuple[Rank, int, Sequence]]] = {task: [] for task in Task}
        self._num_stale: Counter[Task] = Counter()
        self._tickets = itertools.count(1)
        self.num_waiting: Counter[Task] = Counter()
        self.num_pending: Counter[Task] = Counter()
        self.tokens: Counter[Task] = Counter()

    def __len__(self) -> int:
        return self.num_waiting.total()

    def expect(self, sequence: Sequence) -> None:
        """It is PENDING: counted, and not in the order yet."""
        self._count(sequence, self.num_pending)

    def enter(self, sequence: Sequence) -> None:
        if sequence.state is State.PENDING:
            self.forget(sequence)
        sequence.state = State.WAITING
        self._count(sequence, self.num_waiting)
        self._push(sequence)

    def leave(self, sequence: Sequence) -> None:
        """It starts, pauses or ends; its state is the caller's to set."""
        self.num_waiting[sequence.task] -= 1
        self._uncount(sequence)
        self._drop_entry(sequence)

    def forget(self, sequence: Sequence) -> None:
        """It was expected and is no longer."""
        if sequence.queued_tokens:
            self.num_pending[sequence.task] -= 1
            self._uncount(sequence)

    def head(self, task: Task) -> Sequence | None:
        """The first of the task's sequences, or None."""
        heap = self._heaps[task]
        while heap and heap[0][1] != heap[0][2].ticket:
            heapq.heappop(heap)
            self._num_stale[task] -= 1
        return heap[0][2] if heap else None

    def park(self, sequence: Sequence) -> None:
        self._drop_entry(sequence)

    def unpark(self, sequence: Sequence) -> None:
        """Back into the order, unless it left or was put back already."""
        if sequence.state is State.WAITING and not sequence.ticket:
            self._push(sequence)

    def _push(self, sequence: Sequence) -> None:
        sequence.ticket = next(self._tickets)
        heapq.heappush(self._heaps[sequence.task], (sequence.rank, sequence.ticket, sequence))

    def _drop_entry(self, sequence: Sequence) -> None:
        """Its heap entry is stale now: skipped when it comes to the top, or swept out with the others."""
        if not sequence.ticket:
            return
        sequence.ticket = 0
        task = sequence.task
        heap = self._heaps[task]
        self._num_stale[task] += 1
        if self._num_stale[task] > max(FEW_STALE, len(heap) // 2):
            heap[:] = [entry for entry in heap if entry[1] == entry[2].ticket]
            heapq.heapify(heap)
            self._num_stale[task] = 0

    def _count(self, sequence: Sequence, numbers: Counter[Task]) -> None:
        numbers[sequence.task] += 1
        sequence.queued_tokens = sequence.num_own_tokens
        self.tokens[sequence.task] += sequence.queued_tokens

    def _uncount(self, sequence: Sequence) -> None:
        self.tokens[sequence.task] -= sequence.queued_tokens
        sequence.queued_tokens = 0
