"""Who gives way when blocks run out, and whether a waiting prompt may start."""

from __future__ import annotations

from pyruntime.scheduler.plan import StepPlan
from pyruntime.scheduler.population import Population
from pyruntime.scheduler.sequence import Sequence
from pyruntime.scheduler.sharing import Shared
from pyruntime.types import Task

# While a waiting prompt finds too few blocks, smaller ones of other tasks start before it for so many steps; then
# nothing starts until it fits.
MAX_STEPS_PASSED = 64


class Room:
    """First what does no work gives way (held prefixes, paused sequences), then the running sequence of lowest rank.

    The sequence of the highest rank thus never gives way, so somebody always gets on.
    """

    def __init__(self, population: Population) -> None:
        self._population = population
        self._memory = population.memory
        self._passed: dict[Task, tuple[Sequence, int]] = {}  # a head that found too few blocks, for how many steps

    def begin(self) -> None:
        """A step starts."""
        queue = self._population.queue
        self._passed = {task: entry for task, entry in self._passed.items() if queue.head(task) is entry[0]}

    def reserve(self, sequence: Sequence, num_tokens: int, plan: StepPlan) -> int:
        """Blocks for the next ``num_tokens`` of a running sequence; returns for how many, 0 when it cannot go on now.

        When its own rank is the lowest, a stream is set back; a prompt stands still while others run.
        """
        population, memory = self._population, self._memory
        while not memory.reserve(sequence, num_tokens):
            wanted = memory.num_wanted(sequence, num_tokens)
            population.free_held(wanted)
            population.free_paused(wanted)
            if wanted <= memory.num_free:
                continue
            lowest = max(s for s in population.running if s not in plan)
            if lowest is not sequence or sequence.is_decoding:
                population.set_back(lowest)
                if lowest is sequence:
                    return 0
            elif len(population.running) > 1:
                return 0
            else:  # alone: what there is will do
                num_tokens = memory.most_tokens(sequence)
        return num_tokens

    def for_start(self, sequence: Sequence, shared: Shared, is_idle: bool) -> Shared | None:
        """What the sequence shares, if the rest of its prompt fits now; a half-fitting one would only be set back.

        ``shared``: what it would share as things stand; making room may cost some of it.
        ``is_idle``: nothing else runs, so what is held for other requests' children has to give way too.
        """
        overdue = {task for task, (_, count) in self._passed.items() if count >= MAX_STEPS_PASSED}
        if overdue and sequence.task not in overdue:
            return None
        missing = self._memory.num_missing(sequence, shared)
        if missing > 0:
            shared = self._squeeze(sequence, shared, is_idle)
            missing = self._memory.num_missing(sequence, shared)
        if missing > 0:
            _, count = self._passed.get(sequence.task, (sequence, 0))
            self._passed[sequence.task] = (sequence, count + 1)
            return None
        self._passed.pop(sequence.task, None)
        return shared

    def _squeeze(self, sequence: Sequence, shared: Shared, is_idle: bool) -> Shared:
        """Make blocks free for a prompt that lacks some; its parent's only in the end, when its share is found anew."""
        population, memory = self._population, self._memory
        needed = memory.num_needed(sequence, shared)
        if not is_idle:
            idle_blocks = sum(len(s.blocks) for s in population.paused if s is not sequence.parent)
            if needed <= memory.num_free + idle_blocks:
                population.free_paused(needed, keep=sequence.parent)
            return shared
        population.free_paused(needed, keep=sequence.parent)
        population.free_held(needed, keep=sequence.parent)
        if memory.num_missing(sequence, shared) > 0:
            population.free_paused(memory.num_blocks)
            population.free_held(memory.num_blocks)
            return memory.shared_by(sequence)
        return shared
