"""Fair shares of the prompt budget among tasks: weighted fair queueing by virtual time.

Each task has a virtual time, the cost that it was served over its weight, and the least goes first. While two tasks
have prompts to compute they get costs in the ratio of their weights, whatever each has queued; a task without work
gets nothing and saves nothing up, so no capacity is left idle. (Demers, Keshav and Shenker 1989; the rule for tasks
that come back is that of start-time fair queueing, Goyal, Vin and Cheng 1996.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pyruntime.types import Task


class TaskShares:
    """``weights``: relative shares, greater than 0; a task that is left out has the weight 1."""

    def __init__(self, weights: Mapping[Task, float] | None = None) -> None:
        given = weights or {}
        for task, weight in given.items():
            if not weight > 0:
                raise ValueError(f"task_shares: {task.value} is {weight}; allowed: above 0")
        self._weights = {task: float(given.get(task, 1.0)) for task in Task}
        self._times = dict.fromkeys(Task, 0.0)
        self._busy: set[Task] = set()
        self._floor = 0.0

    def begin(self, busy: Iterable[Task]) -> None:
        """A step starts; ``busy`` have prompts to compute. Those that had none before begin level with the others."""
        busy = set(busy)
        staying = [self._times[task] for task in busy & self._busy]
        if staying:
            self._floor = max(self._floor, min(staying))
        for task in busy - self._busy:
            self._times[task] = max(self._times[task], self._floor)
        self._busy = busy

    def time(self, task: Task) -> float:
        """The task's virtual time; the least goes first."""
        return self._times[task]

    def charge(self, task: Task, cost: float) -> None:
        self._times[task] += cost / self._weights[task]

    def forgo(self, task: Task) -> None:
        """The task could not use its turn (no room), which earns it no turns later."""
        self._busy.discard(task)
