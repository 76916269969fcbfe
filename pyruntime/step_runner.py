"""Runs what the scheduler planned; when that raises, finds out whose fault it is by running halves again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from pyruntime.scheduler.plan import StepPlan
from pyruntime.scheduler.sequence import Sequence
from pyruntime.types import ForwardBatch, Task

log = logging.getLogger(__name__)

# Forwards that a failed step may cost on top: enough to find two culprits among 256 sequences.
MAX_RERUNS = 32
# Requests named by one log line.
MOST_NAMED = 16
FATAL_TYPES = frozenset({"AcceleratorError"})
FATAL_TEXTS = ("CUDA error", "device-side assert")
MEMORY_TEXTS = ("out of memory", "ALLOC_FAILED")


class BatchMaker(Protocol):
    def build(self, plan: StepPlan) -> ForwardBatch: ...


class Runner(Protocol):
    def forward(self, batch: ForwardBatch) -> Any: ...


class HeadSet(Protocol):
    def read(self, hidden: Any, batch: ForwardBatch) -> list[Any]:
        """One entry a ``reads`` row, in row order: sampled token, vector or scores; None where not finite."""
        ...


class DeviceLost(Exception):
    """The device has failed for good: nothing that this process computes on it can be trusted any more."""


def is_fatal(error: BaseException) -> bool:
    """Whether the device is lost. Known by name, as torch's errors are not to be imported here.

    After a sticky CUDA error every later call of the process fails. Memory that ran out is not one: less may fit.
    """
    text = str(error)
    if any(hint in text for hint in MEMORY_TEXTS):
        return False
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & FATAL_TYPES) or any(hint in text for hint in FATAL_TEXTS)


@dataclass(slots=True)
class Outcome:
    """What the heads read of each sequence, and the owners of those that could not be computed."""

    outputs: list[tuple[Sequence, Any]] = field(default_factory=list)
    failed: dict[Any, Exception] = field(default_factory=dict)


class StepRunner:
    """Builder, runner and heads of one model.

    Running a part of a plan again is harmless: it writes the same keys and values to the same places, and a draw
    depends on nothing that an earlier run has changed.
    """

    def __init__(
        self,
        builder: BatchMaker,
        runner: Runner,
        heads: HeadSet,
        fatal: Callable[[BaseException], bool] = is_fatal,
    ) -> None:
        self._builder = builder
        self._runner = runner
        self._heads = heads
        self._is_fatal = fatal
        self._began_at: float | None = None

    @property
    def seconds_in_step(self) -> float:
        """How long the forward that runs now has been at it; 0 while none does."""
        began = self._began_at
        return 0.0 if began is None else time.monotonic() - began

    def run(self, plan: StepPlan) -> Outcome:
        """Raises ``DeviceLost``. Any other error fails the requests that cause it, or, past ``MAX_RERUNS``, may."""
        outcome = Outcome()
        parts, reruns = [plan], 0
        while parts:
            part = parts.pop()
            try:
                outcome.outputs += self._forward(part)
            except Exception as error:
                if self._is_fatal(error):
                    raise DeviceLost(f"{type(error).__name__}: {error}") from error
                fields = {"request_ids": _request_ids(part)}
                log.warning(
                    "a forward of %d sequences failed", len(part.entries), exc_info=not reruns, extra={"fields": fields}
                )
                owners = {sequence.owner: error for sequence, _ in part.entries}
                if len(owners) == 1 or reruns + 2 > MAX_RERUNS:
                    outcome.failed |= owners
                    continue
                reruns += 2
                parts += reversed(part.halves())
        return outcome

    def _forward(self, plan: StepPlan) -> list[tuple[Sequence, Any]]:
        # Rows of earlier chunks, which the heads add to and use up as they read.
        partial = [(s, list(s.partial_hidden)) for s, _ in plan.entries if s.task is not Task.GENERATE]
        try:
            batch, outputs = self._compute(plan)
        except Exception:
            for sequence, rows in partial:
                sequence.partial_hidden = rows
            raise
        return list(zip((row.sequence for row in batch.rows if row.reads), outputs, strict=True))

    def _compute(self, plan: StepPlan) -> tuple[ForwardBatch, list[Any]]:
        self._began_at = time.monotonic()
        try:
            batch = self._builder.build(plan)
            return batch, self._heads.read(self._runner.forward(batch), batch)
        finally:
            self._began_at = None


def _request_ids(part: StepPlan) -> list[str]:
    """Of the requests in it, those that have one, at most ``MOST_NAMED``."""
    names = dict.fromkeys(getattr(sequence.payload, "request_id", "") for sequence, _ in part.entries)
    return [name for name in names if name][:MOST_NAMED]
