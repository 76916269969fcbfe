"""The part of a step that is for prompts: who gets the next chunk of it, until it is spent."""

from __future__ import annotations

from collections import deque

from pyruntime.scheduler.budget import PromptBudget
from pyruntime.scheduler.places import Places
from pyruntime.scheduler.plan import StepPlan
from pyruntime.scheduler.population import Population
from pyruntime.scheduler.room import Room
from pyruntime.scheduler.sequence import Sequence, State
from pyruntime.scheduler.shares import TaskShares
from pyruntime.scheduler.sharing import Shared
from pyruntime.types import TASKS, Task


class PromptFiller:
    """Takes turns between tasks by their shares, and within a task goes by rank, among running and waiting alike."""

    def __init__(self, population: Population, room: Room, places: Places, shares: TaskShares) -> None:
        self._population = population
        self._queue = population.queue
        self._groups = population.groups
        self._room = room
        self._places = places
        self._shares = shares

    def fill(self, plan: StepPlan, budget: PromptBudget) -> None:
        """Add chunks to the plan until the budget is spent or nobody can use it."""
        if self._groups is not None:
            self._groups.begin()
        self._room.begin()
        running = self._running_prompts()
        self._shares.begin(task for task in TASKS if running[task] or self._queue.head(task) is not None)
        closed = set[Task]()  # whose waiting sequences cannot start in this step
        while not budget.is_spent:
            found = [first for task in TASKS if (first := self._first(task, running[task], task in closed))]
            if not found:
                break
            sequence = min(found, key=lambda s: (self._shares.time(s.task), s.rank))
            if sequence.state is State.RUNNING:
                running[sequence.task].popleft()
                self._run(sequence, plan, budget)
            elif not self._start(sequence, plan, budget):
                closed.add(sequence.task)

    def _running_prompts(self) -> dict[Task, deque[Sequence]]:
        prompts: dict[Task, deque[Sequence]] = {task: deque() for task in TASKS}
        for sequence in sorted(s for s in self._population.running if not s.is_decoding):
            prompts[sequence.task].append(sequence)
        return prompts

    def _first(self, task: Task, running: deque[Sequence], is_closed: bool) -> Sequence | None:
        """The task's sequence whose turn it is: of its running prompts and its queue the one of higher rank."""
        while running and running[0].state is not State.RUNNING:  # set back in this step
            running.popleft()
        waiting = None if is_closed else self._queue.head(task)
        if running and (waiting is None or running[0] < waiting):
            return running[0]
        return waiting

    def _run(self, sequence: Sequence, plan: StepPlan, budget: PromptBudget) -> None:
        """The next chunk of a running prompt, if there are budget and blocks for one."""
        if self._population.memory.pool is None:
            num_tokens = sequence.num_remaining if budget.whole(sequence.num_remaining) else 0
        else:
            num_tokens = budget.chunk(sequence, sequence.num_remaining, sequence.num_computed)
        if num_tokens > 0:
            num_tokens = self._room.reserve(sequence, num_tokens, plan)
        if num_tokens > 0:
            self._shares.charge(sequence.task, budget.spend(sequence, num_tokens, plan))

    def _start(self, sequence: Sequence, plan: StepPlan, budget: PromptBudget) -> bool:
        """The head of a queue starts, or waits for another to compute their common prefix; False: it cannot do either.

        What starts gets a token at least, so the budget is asked before anything is taken.
        """
        population = self._population
        shared = population.memory.shared_by(sequence)
        if not self._affords(sequence, shared, budget):
            return False
        if not self._places.has_one(sequence.task, population.num_running):
            self._shares.forgo(sequence.task)
            return False
        if self._groups is not None and self._groups.joins(sequence, shared):
            self._queue.park(sequence)
            return True
        fitting = self._room.for_start(sequence, shared, is_idle=budget.is_alone and not population.running)
        if fitting is None:
            self._shares.forgo(sequence.task)
            return False
        population.start(sequence, fitting, plan)
        self._run(sequence, plan, budget)
        return True

    def _affords(self, sequence: Sequence, shared: Shared, budget: PromptBudget) -> bool:
        if self._population.memory.pool is None:
            return budget.whole(len(sequence))
        return budget.chunk(sequence, 1, shared.num_tokens) > 0
