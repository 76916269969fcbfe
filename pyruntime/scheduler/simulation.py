"""The scheduler at simulated time: arrivals go in, steps take what a cost model says, figures come out.

No model runs, so minutes of load take seconds and every run of the same arrivals gives the same figures. The
scheduler, its blocks and its prefix cache are the real ones.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pyruntime.scheduler.blocks import BlockPool
from pyruntime.scheduler.cost import DEFAULT_EQUAL_DEPTH, CostModel
from pyruntime.scheduler.plan import StepPlan
from pyruntime.scheduler.prefix_cache import PrefixCache
from pyruntime.scheduler.scheduler import Scheduler
from pyruntime.scheduler.sequence import Sequence, State
from pyruntime.types import Task

# Ids of tokens that no two requests share begin here; below lie the shared prefixes, this many ids each.
_OWN_IDS = 2**40
_PREFIX_IDS = 2**20


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request. Lengths in tokens, times in seconds.

    ``prompt_tokens``: of each sequence, the shared prefix not counted. ``new_tokens``: what Generate makes, at least 1.
    ``items``: continuations (Generate), inputs (Embed) or items behind the prefix (Score, Classify).
    ``prefix_tokens``: of the prefix that all requests with the same ``prefix`` number begin with.
    ``cancel_after_s``: the client goes away that long after the arrival, if it has no answer by then.
    """

    time_s: float
    task: Task
    prompt_tokens: int
    new_tokens: int = 0
    items: int = 1
    priority: int = 0
    prefix_tokens: int = 0
    prefix: int = 0
    cancel_after_s: float | None = None

    def __post_init__(self) -> None:
        least = {"prompt_tokens": 1, "items": 1, "prefix_tokens": 0, "new_tokens": int(self.task is Task.GENERATE)}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise ValueError(f"{name}: {getattr(self, name)}; allowed: at least {low}")
        if self.time_s < 0 or self.prefix_tokens > _PREFIX_IDS:
            raise ValueError(f"time_s: {self.time_s}, prefix_tokens: {self.prefix_tokens}; allowed: from 0, to 2^20")


def read_arrival(fields: dict[str, Any]) -> Arrival:
    """From a line of a trace: the fields of ``Arrival`` by name, ``task`` in lower case. ValueError if it is bad."""
    try:
        return Arrival(**fields | {"task": Task(fields["task"])})
    except (TypeError, KeyError) as error:
        raise ValueError(f"not an arrival: {error}") from error


@dataclass(frozen=True, slots=True)
class Machine:
    """What the simulated model costs: a step takes (base_tokens + its token equivalents) · seconds_a_token."""

    seconds_a_token: float = 0.001
    base_tokens: int = 48
    equal_cost_depth: int = DEFAULT_EQUAL_DEPTH


@dataclass(slots=True, eq=False)
class Request:
    """A request's way through the simulation; times in simulated seconds, None until they have come."""

    arrival: Arrival
    sequences: list[Sequence]
    started_at: float | None = None
    ended_at: float | None = None
    is_cancelled: bool = False
    token_times: dict[int, list[float]] = field(default_factory=dict)
    num_open: int = 0

    @property
    def longest_pause_s(self) -> float:
        """Between two tokens of one continuation."""
        pauses = (b - a for times in self.token_times.values() for a, b in itertools.pairwise(times))
        return max(pauses, default=0.0)


@dataclass(slots=True)
class Outcome:
    """All requests, in order of arrival, and what the steps took."""

    requests: list[Request]
    seconds: float = 0.0
    num_steps: int = 0
    most_blocks_used: int = 0
    computed_tokens: dict[Task, int] = field(default_factory=lambda: dict.fromkeys(Task, 0))
    longest_step_s: float = 0.0


class Simulation:
    """Runs ``arrivals`` to their ends. ``options`` go to ``Scheduler``; ``watch`` sees each plan before it runs."""

    def __init__(
        self,
        arrivals: Iterable[Arrival],
        *,
        machine: Machine = Machine(),
        num_blocks: int = 4096,
        block_size: int = 16,
        max_batch_tokens: int = 2048,
        max_running: int = 256,
        watch: Callable[[StepPlan], None] = lambda plan: None,
        **options: Any,
    ) -> None:
        self.now = 0.0
        pool = BlockPool(num_blocks, block_size)
        self.pool = pool
        self.scheduler = Scheduler(
            pool, max_batch_tokens, max_running, prefix_cache=PrefixCache(pool), clock=lambda: self.now, **options
        )
        self._machine = machine
        self._costs = CostModel(machine.equal_cost_depth, options.get("window"))
        self._watch = watch
        self._order = itertools.count()
        self._own_ids = itertools.count(_OWN_IDS)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._outcome = Outcome([])
        for arrival in sorted(arrivals, key=lambda a: a.time_s):
            self._at(arrival.time_s, partial(self._arrive, arrival))

    def run(self) -> Outcome:
        """RuntimeError when work is left that the scheduler does not run, or a sequence does not fit the pool."""
        while self._events or self.scheduler.has_work:
            if not self.scheduler.has_work:
                self.now = max(self.now, self._events[0][0])
            while self._events and self._events[0][0] <= self.now:
                heapq.heappop(self._events)[2]()
            if self.scheduler.has_work:
                self._step()
        self._outcome.seconds = self.now
        return self._outcome

    def _at(self, time_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), event))

    def _arrive(self, arrival: Arrival) -> None:
        sequences = list(self._sequences(arrival))
        longest = max(len(sequence) for sequence in sequences) + arrival.new_tokens
        if longest > self.pool.num_tokens:
            raise RuntimeError(f"a sequence of {longest} tokens does not fit into {self.pool.num_tokens}")
        request = Request(arrival, sequences, num_open=sum(not s.is_prefix for s in sequences))
        for sequence in sequences:
            sequence.owner = request
        self._outcome.requests.append(request)
        self.scheduler.add(sequences)
        if arrival.cancel_after_s is not None:
            self._at(self.now + arrival.cancel_after_s, partial(self._cancel, request))

    def _sequences(self, arrival: Arrival) -> Iterator[Sequence]:
        task, first_id = arrival.task, arrival.prefix * _PREFIX_IDS
        prefix = list(range(first_id, first_id + arrival.prefix_tokens))
        parent = None
        if task in (Task.SCORE, Task.CLASSIFY) and prefix and arrival.items > 1:
            parent = Sequence(task, list(prefix), index=-1, priority=arrival.priority, is_prefix=True)
            yield parent
        own: list[int] = []
        for index in range(arrival.items):
            if task is not Task.GENERATE or not own:
                own = list(itertools.islice(self._own_ids, arrival.prompt_tokens))
            sequence = Sequence(task, prefix + own, index=index, priority=arrival.priority, parent=parent)
            if task is Task.GENERATE and parent is None:
                parent = sequence
            yield sequence

    def _cancel(self, request: Request) -> None:
        if request.ended_at is None:
            request.ended_at, request.is_cancelled = self.now, True
            for sequence in request.sequences:
                self.scheduler.drop(sequence)

    def _step(self) -> None:
        plan = self.scheduler.schedule()
        if not plan.entries:
            raise RuntimeError(f"nothing runs at {self.now:.3f} s though {self.scheduler.num_waiting} sequences wait")
        self._watch(plan)
        cost = 0
        for sequence, num_tokens in plan.entries:
            cost += self._costs.cost(num_tokens, sequence.num_computed)
            if sequence.owner.started_at is None:
                sequence.owner.started_at = self.now
        seconds = (self._machine.base_tokens + cost) * self._machine.seconds_a_token
        self.now += seconds
        self._note(plan, seconds)
        reading = [s for s, n in plan.entries if s.num_computed + n == len(s) and not s.is_prefix]
        self.scheduler.advance(plan)
        for sequence in reading:
            self._read(sequence)

    def _note(self, plan: StepPlan, seconds: float) -> None:
        outcome = self._outcome
        outcome.num_steps += 1
        outcome.longest_step_s = max(outcome.longest_step_s, seconds)
        outcome.most_blocks_used = max(outcome.most_blocks_used, self.pool.num_used)
        for sequence, num_tokens in plan.entries:
            outcome.computed_tokens[sequence.task] += num_tokens

    def _read(self, sequence: Sequence) -> None:
        """As a head does: a stream gets its next token, everything else is done."""
        request: Request = sequence.owner
        if sequence.task is Task.GENERATE:
            self.scheduler.append_token(sequence, next(self._own_ids))
            request.token_times.setdefault(sequence.index, []).append(self.now)
            if sequence.num_generated < request.arrival.new_tokens:
                return
        assert sequence.state is State.RUNNING
        self.scheduler.finish(sequence)
        request.num_open -= 1
        if request.num_open == 0:
            request.ended_at = self.now
