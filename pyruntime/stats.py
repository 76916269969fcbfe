"""What an engine counts about itself: plain numbers, written by its step thread, read by anyone.

Knows nothing of who publishes them. Writing costs some additions a step and one a token; reading copies. One thread
writes, so no lock is needed: a reader sees each number as it was after some step, two of them perhaps one step apart.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import Counter
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

from pyruntime.types import Task

if TYPE_CHECKING:
    from pyruntime.jobs.base import Job
    from pyruntime.scheduler.plan import StepPlan
    from pyruntime.scheduler.sequence import Sequence

# Upper bounds of the published buckets. Seconds of a wait or a whole request; of a step or a token; tokens of a step.
WAIT_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
STEP_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0)
TOKEN_BOUNDS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0)
# Each published bucket is kept as so many finer ones, from which quantiles are read; the first one from this part on.
FINER, LOWEST_RATIO = 4, 16


class Reading(NamedTuple):
    """A histogram at one moment. ``counts``: of each fine bucket, the last one above every bound."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def num_observed(self) -> int:
        return sum(self.counts)

    def since(self, earlier: Reading | None) -> Reading:
        """What was observed after ``earlier``."""
        if earlier is None:
            return self
        counts = tuple(now - then for now, then in zip(self.counts, earlier.counts, strict=True))
        return Reading(self.bounds, counts, self.total - earlier.total)

    def quantile(self, share: float) -> float | None:
        """The value below which ``share`` of the observations lie, interpolated within its bucket; None without any.

        What lies above the last bound counts as that bound.
        """
        wanted, below = share * self.num_observed, 0
        if wanted == 0:
            return None
        for place, count in enumerate(self.counts[:-1]):
            if count and below + count >= wanted:
                low = self.bounds[place - 1] if place else 0.0
                return low + (self.bounds[place] - low) * (wanted - below) / count
            below += count
        return self.bounds[-1]

    def published(self) -> list[tuple[float, int]]:
        """(upper bound, observations up to it) of the coarse buckets; the last one's bound is infinity."""
        running = list(accumulate(self.counts))
        coarse = [(self.bounds[place], running[place]) for place in range(FINER, len(self.bounds), FINER)]
        return [*coarse, (float("inf"), running[-1])]


class Histogram:
    """Counts of values up to each of ``bounds``, which ascend, and of those above."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = _finer(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0
        self._last: tuple[float, int] = (0.0, 0)  # a value and its bucket: the rows of a step often share theirs

    def observe(self, value: float, count: int = 1) -> None:
        """``count`` times ``value``."""
        if value != self._last[0]:
            self._last = (value, bisect_left(self._bounds, value))
        self._counts[self._last[1]] += count
        self._total += value * count

    def read(self) -> Reading:
        return Reading(self._bounds, tuple(self._counts), self._total)


def _finer(bounds: tuple[float, ...]) -> tuple[float, ...]:
    """The bounds, each gap cut into ``FINER`` parts of equal ratio, and as many more below the first one."""
    lowest = bounds[0] / LOWEST_RATIO
    fine = [lowest]
    for low, high in pairwise((lowest, *bounds)):
        fine += [low * (high / low) ** (part / FINER) for part in range(1, FINER)]
        fine.append(high)
    return tuple(fine)


class Pace:
    """When a request's tokens came. ``marks``: of each continuation, the time of its last token and their number.

    A time of None: it was paused since, and what passed until the next token is the client's time, not the model's.
    """

    __slots__ = ("first_at", "marks")

    def __init__(self) -> None:
        self.first_at: float | None = None
        self.marks: dict[Sequence, tuple[float | None, int]] = {}


class EngineStats:
    """One engine's counters since it began, and its histograms. Times are in seconds, of ``time.monotonic``.

    queue             from the end of tokenising to the request's first step, by task
    whole             from admission, before tokenising, to the step that gave the last result, by task
    first_token       from admission to the step that drew the request's first token
    token_gap         between two tokens of a continuation; tokens of one step share its gap evenly
    step, step_tokens time of a step, waiting for the device included; tokens that it computed
    computed_tokens   of steps, by task, tokens that are computed again included
    prompt_tokens     by task: computed for the first time or found in the prefix cache, a shared prompt once
    hit_tokens        of them, found in the prefix cache
    least_s           by the doublings of tokens of a step, the least time that such a step took
    """

    def __init__(self) -> None:
        self.queue = {task: Histogram(WAIT_BOUNDS) for task in Task}
        self.whole = {task: Histogram(WAIT_BOUNDS) for task in Task}
        self.first_token = Histogram(WAIT_BOUNDS)
        self.token_gap = Histogram(STEP_BOUNDS)
        self.step = Histogram(STEP_BOUNDS)
        self.step_tokens = Histogram(TOKEN_BOUNDS)
        self.computed_tokens = dict.fromkeys(Task, 0)
        self.prompt_tokens = dict.fromkeys(Task, 0)
        self.hit_tokens = dict.fromkeys(Task, 0)
        self.least_s: dict[int, float] = {}
        self.num_drawn_tokens = 0
        self.num_mixed_steps = 0
        self.num_pauses = 0
        self.num_failed = 0

    # -- on the step thread -----------------------------------------------------------------------

    def note_start(self, job: Job, now: float) -> None:
        """The request's first step begins."""
        self.queue[job.sequences[0].task].observe(now - job.submitted_at)

    def note_step(self, plan: StepPlan, seconds: float, num_failed: int) -> None:
        """A step ran, and so many requests failed in it."""
        by_task = Counter[Task]()
        for sequence, num_tokens in plan.entries:
            by_task[sequence.task] += num_tokens
        for task, num_tokens in by_task.items():
            self.computed_tokens[task] += num_tokens
        self.step.observe(seconds)
        doublings = plan.num_tokens.bit_length()
        self.least_s[doublings] = min(seconds, self.least_s.get(doublings, seconds))
        self.step_tokens.observe(plan.num_tokens)
        self.num_mixed_steps += len(by_task) > 1
        self.num_failed += num_failed

    def least_step_s(self, num_tokens: int) -> float:
        """The least time of a step of about so many tokens; infinite before there was one."""
        return self.least_s.get(num_tokens.bit_length(), math.inf)

    def note_prompt(self, task: Task, num_done: int, num_computed: int) -> None:
        """A step of ``num_computed`` tokens left ``num_done`` prompt tokens fewer to compute: others were cached."""
        self.prompt_tokens[task] += num_done
        self.hit_tokens[task] += max(num_done - num_computed, 0)

    def note_tokens(self, job: Job, sequence: Sequence, now: float) -> None:
        """A continuation grew, by one token or several."""
        pace, number = job.pace, sequence.num_generated
        at, before = pace.marks.get(sequence, (None, 0))
        if number == before:  # the request failed instead
            return
        pace.marks[sequence] = (now, number)
        self.num_drawn_tokens += number - before
        if pace.first_at is None:
            pace.first_at = now
            self.first_token.observe(now - job.arrived_at)
        if at is not None:
            self.token_gap.observe((now - at) / (number - before), number - before)

    def note_pause(self, job: Job) -> None:
        """The client does not read: its stream waits for it."""
        self.num_pauses += 1
        marks = job.pace.marks
        for sequence, (_, number) in marks.items():
            marks[sequence] = (None, number)

    def note_end(self, job: Job) -> None:
        """The request has its last result."""
        self.whole[job.sequences[0].task].observe(time.monotonic() - job.arrived_at)
