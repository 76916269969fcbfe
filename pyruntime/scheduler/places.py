"""Places in the batch: bounded in all, and never all taken by one task while another has work."""

from __future__ import annotations

from collections import Counter

from pyruntime.types import Task

# One place in so many is kept free for each other task that has ever come.
KEPT_SHARE = 16


class Places:
    """At most ``max_running`` sequences in the batch, but for a task that has none there.

    Streams keep their places for long, so others cannot count on one coming free: a task without a running sequence
    may start one beyond the limit, and a sixteenth of the places is kept for every other task seen so far. A resumed
    sequence asks for no place, since it had one.
    """

    def __init__(self, max_running: int) -> None:
        self._max_running = max_running
        self._seen: set[Task] = set()

    def expect(self, task: Task) -> None:
        """A sequence of the task has come."""
        self._seen.add(task)

    def has_one(self, task: Task, num_running: Counter[Task]) -> bool:
        """Whether one more sequence of the task may start beside ``num_running`` of each."""
        if num_running[task] == 0:
            return True
        share = self._max_running // KEPT_SHARE
        kept = sum(max(share - num_running[other], 0) for other in self._seen if other is not task)
        return num_running.total() + kept < self._max_running
