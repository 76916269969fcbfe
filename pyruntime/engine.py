"""One model's requests: in from any event loop, results back to it, cancellation between steps.

The engine knows token ids only, and neither torch nor the model: scheduler, batch builder, runner and
heads are injected, so a fake model drives it in tests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pyruntime.admission import Admission, Ticket
from pyruntime.errors import InvalidField, PyruntimeError
from pyruntime.jobs.base import Job
from pyruntime.jobs.batch import ClassifyJob, EmbedJob, ScoreJob
from pyruntime.jobs.generate import BUFFER_TOKENS, GenerateJob, TokenStream
from pyruntime.scheduler.load import SchedulerLoad
from pyruntime.scheduler.scheduler import Scheduler
from pyruntime.stats import EngineStats
from pyruntime.step_loop import StepLoop
from pyruntime.step_runner import BatchMaker, HeadSet, Runner, StepRunner, is_fatal
from pyruntime.step_thread import StepThread
from pyruntime.types import (
    ClassifyRequest,
    ClassifyResult,
    EmbedRequest,
    EmbedResult,
    GenerateRequest,
    ModelInfo,
    ScoreRequest,
    ScoreResult,
    StepTiming,
    Task,
)

log = logging.getLogger(__name__)

MAX_QUEUE_TOKENS = 2**20
# A step that has taken no longer than this is not worth the way to the step thread and back, a fifth of a millisecond.
QUICK_S = 0.001


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How busy a model is.

    num_requests       that have a place, from before their tokenising until their last answer
    num_queued_tokens  prompt tokens that wait to be computed, with the estimates for texts still to be tokenised
    tokens_per_s       how many of them it has done a second of late; None while not known
    num_steps          forwards since the start
    seconds_in_step    how long the forward that runs now has been at it; 0 while none does
    scheduler          sequences, tokens and blocks, by at most a quarter of a second or one step old
    """

    num_requests: int
    num_queued_tokens: int
    tokens_per_s: float | None
    num_steps: int
    seconds_in_step: float
    scheduler: SchedulerLoad


class Engine:
    """Serves one model. Methods may be called from any thread that runs an event loop.

    ``max_queue_requests``, ``max_queue_tokens``, ``max_queue_time_s``: of ``Admission``. ``stream_buffer_tokens``: of
    ``GenerateJob``.
    ``thread``: shared by the engines of one device, so that two models' steps take turns instead of fighting for the
    same cores; None: one of its own. ``fatal``: whether an error of a step means that the device is lost.
    ``lends_steps``: a quick step may run on the thread of the request that asks for it; the device must not mind.

    Each request takes a ``ticket`` of ``admit``, or only a ``deadline`` on the clock of ``time.monotonic``. Any of
    them raises ``Overloaded``, ``DeadlinePassed`` or ``NotReady`` when the request cannot come in, ``InvalidField``
    when it can never fit, ``DeadlinePassed`` when its deadline passes, ``ComputeFault`` when computing it fails.
    """

    def __init__(
        self,
        info: ModelInfo,
        scheduler: Scheduler,
        builder: BatchMaker,
        runner: Runner,
        heads: HeadSet,
        *,
        max_queue_requests: int = 1024,
        max_queue_tokens: int = MAX_QUEUE_TOKENS,
        max_queue_time_s: float = 0.0,
        stream_buffer_tokens: int = BUFFER_TOKENS,
        thread: StepThread | None = None,
        fatal: Callable[[BaseException], bool] = is_fatal,
        lends_steps: bool = False,
    ) -> None:
        self._lends_steps = lends_steps
        self.info = info
        self._scheduler = scheduler
        self._buffer_tokens = stream_buffer_tokens
        # Told, on the step thread, when something ends it; the owner then takes the model out of service. When the
        # device is lost, ``on_device_lost`` is told after that and after every open request has been answered: the
        # owner then ends the process.
        self.on_failed: Callable[[str], None] | None = None
        self.on_device_lost: Callable[[str], None] | None = None
        self._admission = Admission(info.name, max_queue_requests, max_queue_tokens, max_queue_time_s)
        self.stats = EngineStats()
        self._steps = StepRunner(builder, runner, heads, fatal)
        thread = thread or StepThread(f"engine-{info.name}")
        tell = (lambda reason: _tell(self.on_failed, reason)), (lambda reason: _tell(self.on_device_lost, reason))
        self._loop = StepLoop(info, scheduler, self._steps, self._admission, self.stats, thread, *tell)

    # -- called from event loops ------------------------------------------------------------------

    def admit(
        self, task: Task, priority: int = 0, *, num_bytes: int = 0, num_ids: int = 0, deadline: float | None = None
    ) -> Ticket:
        """A place for a request that is still to be tokenised, as ``Admission.admit``; ``NotReady`` when closed."""
        if self._loop.is_closed:
            raise self._loop.not_ready()
        return self._admission.admit(task, priority, num_bytes=num_bytes, num_ids=num_ids, deadline=deadline)

    def generate(
        self, request: GenerateRequest, *, ticket: Ticket | None = None, deadline: float | None = None
    ) -> TokenStream:
        """Tokens of ``request.n`` continuations. A client that does not take them pauses its own request alone."""
        job = GenerateJob(request, self._buffer_tokens)
        self._submit(job, ticket, deadline)
        return TokenStream(job, self._loop.cancel, self._loop.caught_up)

    async def embed(
        self,
        request: EmbedRequest,
        *,
        ticket: Ticket | None = None,
        deadline: float | None = None,
        at_once: bool = False,
    ) -> tuple[list[EmbedResult], StepTiming]:
        """One result an input, in order. Cancelling the awaiting task stops the work.

        ``at_once``: nobody else waits for the event loop, so that a quick step may run on it.
        """
        return await self._answer(EmbedJob(request), ticket, deadline, at_once)

    async def score(
        self, request: ScoreRequest, *, ticket: Ticket | None = None, deadline: float | None = None
    ) -> tuple[list[ScoreResult], StepTiming]:
        """One result an item, in order. Cancelling the awaiting task stops the work."""
        return await self._answer(ScoreJob(request), ticket, deadline)

    async def classify(
        self, request: ClassifyRequest, *, ticket: Ticket | None = None, deadline: float | None = None
    ) -> tuple[list[ClassifyResult], StepTiming]:
        """One result an input, in order. Cancelling the awaiting task stops the work."""
        shares = self._scheduler.blocks is not None
        job = ClassifyJob(
            request,
            reads_all_rows=self.info.classifies_tokens,
            shares_prefix=shares,
            ignored_tail_id=self.info.ignored_tail_id,
        )
        return await self._answer(job, ticket, deadline)

    @property
    def num_open(self) -> int:
        """Requests accepted and not yet ended."""
        return self._loop.num_open

    @property
    def num_blocks_used(self) -> int:
        blocks = self._scheduler.blocks
        return blocks.num_used if blocks is not None else 0

    @property
    def seconds_in_step(self) -> float:
        """How long the forward that runs now has been at it; 0 while none does."""
        return self._steps.seconds_in_step

    @property
    def is_closed(self) -> bool:
        return self._loop.is_closed

    def load(self) -> EngineLoad:
        """How busy the model is now; may be called from any thread."""
        return EngineLoad(
            num_requests=self._admission.num_open,
            num_queued_tokens=self._admission.num_queued_tokens,
            tokens_per_s=self._admission.tokens_per_s,
            num_steps=self._loop.num_steps,
            seconds_in_step=self.seconds_in_step,
            scheduler=self._loop.scheduler_load,
        )

    def probe(self, answer: Callable[[], None]) -> None:
        """Call ``answer`` on the step thread before its next step: late when a step hangs, never when it has ended."""
        self._loop.command(answer)

    def turn_away(self, error: PyruntimeError) -> None:
        """From now on, requests of which nothing has been computed end with ``error``; the others go on."""
        self._loop.turn_away(error)

    def close(self) -> None:
        """Leave the step thread; open requests end with ``NotReady``."""
        self._loop.close()

    async def _answer(self, job: Any, ticket: Ticket | None, deadline: float | None, at_once: bool = False) -> Any:
        self._submit(job, ticket, deadline, at_once and self._is_quick(job))
        try:
            return await job.future
        except asyncio.CancelledError:
            self._loop.cancel(job, None)
            raise

    def _is_quick(self, job: Job) -> bool:
        return self._lends_steps and self.stats.least_step_s(job.num_unread) <= QUICK_S

    def _submit(self, job: Job, ticket: Ticket | None, deadline: float | None, at_once: bool = False) -> None:
        most = max(len(sequence) for sequence in job.sequences) + job.num_new_tokens
        if most > self.info.context_length:
            limit = f"the model takes {self.info.context_length}"
            raise InvalidField("input", f"{most} tokens in all, {limit}")
        first = job.sequences[0]
        job.owns_ticket = ticket is None
        job.ticket = ticket or self.admit(first.task, first.priority, deadline=deadline)
        try:
            self._loop.submit(job, at_once)
        except PyruntimeError:
            if job.owns_ticket:
                job.ticket.release()
            raise


def _tell(listener: Callable[[str], None] | None, reason: str) -> None:
    """A listener that fails itself must not keep the open requests from their answer."""
    if listener is not None:
        try:
            listener(reason)
        except Exception:
            log.exception("nobody could be told: %s", reason)
