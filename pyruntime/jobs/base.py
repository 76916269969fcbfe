"""A request while it is inside the engine: its sequences, and how their outputs become its answer.

``take``, ``fail`` and ``flush`` run on the step thread. What a step has for the event loop goes through one
``Outbox``, so a loop is woken once a step, however many requests moved.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pyruntime.errors import PyruntimeError
from pyruntime.jobs.outbox import Outbox
from pyruntime.scheduler.scheduler import Scheduler
from pyruntime.scheduler.sequence import Sequence
from pyruntime.stats import Pace
from pyruntime.types import StepTiming

if TYPE_CHECKING:
    from pyruntime.admission import Ticket


class Job:
    """What all kinds share: ownership of sequences, place in the queue and timing.

    ``ticket``: the place that the request takes up; ``owns_ticket``: the job gives it back at its end, since no caller
    does. ``paused``: its sequences are out of the batch until the client has caught up. ``unread``: of each sequence,
    the prompt tokens that wait to be computed. ``settled``: to be called, on any thread, when what a sequence waited
    for aside of the steps is there.
    """

    def __init__(self, sequences: list[Sequence]) -> None:
        self.sequences = sequences
        for sequence in sequences:
            sequence.owner = self
        self.loop = asyncio.get_running_loop()
        self.submitted_at = time.monotonic()
        self.started_at: float | None = None
        self.ticket: Ticket | None = None
        self.owns_ticket = False
        self.paused = False
        self.settled: Callable[[Sequence], None] | None = None
        self.unread = {sequence: _own_tokens(sequence) for sequence in sequences}
        self.pace = Pace()

    @property
    def arrived_at(self) -> float:
        """When it was admitted, before its texts were tokenised."""
        return self.ticket.taken_at if self.ticket is not None else self.submitted_at

    @property
    def deadline(self) -> float | None:
        """On the clock of ``time.monotonic``."""
        return self.ticket.deadline if self.ticket is not None else None

    @property
    def has_run(self) -> bool:
        """Something of the request has been computed, if not for this job then for another one of its."""
        return self.ticket is not None and self.ticket.has_run

    def note_run(self) -> None:
        assert self.ticket is not None
        self.ticket.has_run = True

    @property
    def num_unread(self) -> int:
        """Prompt tokens that wait to be computed, a shared prompt counted once."""
        return sum(self.unread.values())

    @property
    def num_unread_certain(self) -> int:
        """Of them, those that no cached prefix can stand in for."""
        return sum(tokens for sequence, tokens in self.unread.items() if not sequence.reuses_prefix)

    def note_computed(self, sequence: Sequence) -> int:
        """How many of the tokens that waited do so no more, after a step that ran some of ``sequence``.

        A preempted sequence computes tokens again; those have left the queue once and for all.
        """
        before = self.unread.get(sequence)
        if before is None:
            return 0
        left = min(before, sequence.num_prompt - sequence.num_computed)
        if left > 0:
            self.unread[sequence] = left
            return before - left
        del self.unread[sequence]
        return before

    @property
    def num_new_tokens(self) -> int:
        """The most tokens that one sequence may still grow by."""
        return 0

    @property
    def done(self) -> bool:
        raise NotImplementedError

    @property
    def is_behind(self) -> bool:
        """The client has not taken what was sent, so much of it that more must wait."""
        return False

    @property
    def has_caught_up(self) -> bool:
        """A job that was behind may go on."""
        return True

    def take(self, sequence: Sequence, output: Any, scheduler: Scheduler) -> None:
        """The head's output of one sequence; None means that it was not finite."""
        raise NotImplementedError

    def settle(self, sequence: Sequence, scheduler: Scheduler) -> None:
        """What the sequence waited for, aside of the steps, is there."""

    def fail(self, error: PyruntimeError) -> None:
        raise NotImplementedError

    def flush(self, outbox: Outbox) -> None:
        """Put what the client should hear into ``outbox``."""
        raise NotImplementedError

    def pause(self, scheduler: Scheduler) -> None:
        """Out of the batch until ``resume``."""
        self.paused = True
        for sequence in self.sequences:
            scheduler.pause(sequence)

    def resume(self, scheduler: Scheduler) -> None:
        self.paused = False
        for sequence in self.sequences:
            if not sequence.is_followed:
                scheduler.resume(sequence)

    def drop(self, scheduler: Scheduler) -> None:
        """Nothing more is computed for it."""
        for sequence in self.sequences:
            scheduler.drop(sequence)

    def abandon(self) -> None:
        """The client went away: nothing more is sent."""

    def close_index(self, index: int) -> None:
        """Continuation ``index`` was stopped by the client."""

    def timing(self) -> StepTiming:
        now, started, first_at = time.monotonic(), self.started_at, self.pace.first_at
        if started is None:
            return StepTiming(now - self.submitted_at, 0.0)
        prefill_s = None if first_at is None else first_at - started
        return StepTiming(started - self.submitted_at, now - started, prefill_s)


def _own_tokens(sequence: Sequence) -> int:
    """Prompt tokens that are not its parent's; at least the last is computed by every sequence itself."""
    parent = sequence.parent
    return len(sequence) if parent is None else max(1, len(sequence) - len(parent))
