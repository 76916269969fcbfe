"""A request while it is inside the engine: its sequences, and how their outputs become its answer.

``take``, ``fail`` and ``flush`` run on the step thread. What a step has for the event loop goes through one
``Outbox``, so a loop is woken once a step, however many requests moved.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from pyruntime.errors import PyruntimeError
from pyruntime.jobs.outbox import Outbox
from pyruntime.scheduler.scheduler import Scheduler
from pyruntime.scheduler.sequence import Sequence
from pyruntime.types import StepTiming


class Job:
    """What the three kinds share: ownership of sequences and timing."""

    def __init__(self, sequences: list[Sequence]) -> None:
        self.sequences = sequences
        for sequence in sequences:
            sequence.owner = self
        self.loop = asyncio.get_running_loop()
        self.submitted_at = time.monotonic()
        self.started_at: float | None = None

    @property
    def num_new_tokens(self) -> int:
        """The most tokens that one sequence may still grow by."""
        return 0

    @property
    def done(self) -> bool:
        raise NotImplementedError

    def take(self, sequence: Sequence, output: Any, scheduler: Scheduler) -> None:
        """The head's output of one sequence; None means that it was not finite."""
        raise NotImplementedError

    def fail(self, error: PyruntimeError) -> None:
        raise NotImplementedError

    def flush(self, outbox: Outbox) -> None:
        """Put what the client should hear into ``outbox``."""
        raise NotImplementedError

    def abandon(self) -> None:
        """The client went away: nothing more is sent."""

    def close_index(self, index: int) -> None:
        """Continuation ``index`` was stopped by the client."""

    def timing(self) -> StepTiming:
        started = self.started_at or self.submitted_at
        return StepTiming(queue_s=started - self.submitted_at, compute_s=time.monotonic() - started)
