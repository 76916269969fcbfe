"""One step thread a model: requests in from any event loop, results back to it, cancellation between steps.

The engine knows token ids only, and neither torch nor the model: scheduler, batch builder, runner and
heads are injected, so a fake model drives it in tests.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from pyruntime.errors import ComputeFault, InvalidField, NotReady, Overloaded, PyruntimeError
from pyruntime.gate import FairLock
from pyruntime.jobs.base import Job
from pyruntime.jobs.batch import ClassifyJob, EmbedJob, ScoreJob
from pyruntime.jobs.generate import GenerateJob, TokenStream
from pyruntime.jobs.outbox import Outbox
from pyruntime.scheduler.plan import StepPlan
from pyruntime.scheduler.scheduler import Scheduler
from pyruntime.types import (
    ClassifyRequest,
    ClassifyResult,
    EmbedRequest,
    EmbedResult,
    ForwardBatch,
    GenerateRequest,
    ModelInfo,
    ScoreRequest,
    ScoreResult,
    StepTiming,
)

log = logging.getLogger(__name__)


class BatchMaker(Protocol):
    def build(self, plan: StepPlan) -> ForwardBatch: ...


class Runner(Protocol):
    def forward(self, batch: ForwardBatch) -> Any: ...


class HeadSet(Protocol):
    def read(self, hidden: Any, batch: ForwardBatch) -> list[Any]:
        """One entry a ``reads`` row, in row order: sampled token, vector or scores; None where not finite."""
        ...


class Engine:
    """Serves one model. Methods may be called from any thread that runs an event loop.

    ``compute_gate``: a lock shared by the engines of one device, so that two models' steps take turns
    instead of fighting for the same cores.
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
        compute_gate: Any = None,
    ) -> None:
        self.info = info
        self._scheduler = scheduler
        self._builder = builder
        self._runner = runner
        self._heads = heads
        self._max_queue_requests = max_queue_requests
        self._gate = compute_gate or FairLock()
        self._condition = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()
        self._jobs: set[Job] = set()
        self._closed = False
        self._outbox = Outbox()
        self._seconds_a_request = 0.1
        self.num_steps = 0
        # Told, on the step thread, when a bug ends it; the owner then takes the model out of service.
        self.on_failed: Callable[[str], None] | None = None
        self._thread = threading.Thread(target=self._loop, name=f"engine-{info.name}", daemon=True)
        self._thread.start()

    # -- called from event loops ------------------------------------------------------------------

    def generate(self, request: GenerateRequest) -> TokenStream:
        """Tokens of ``request.n`` continuations. Raises ``Overloaded`` or ``NotReady`` at once."""
        job = GenerateJob(request)
        self._submit(job)
        return TokenStream(job, self._cancel)

    async def embed(self, request: EmbedRequest) -> tuple[list[EmbedResult], StepTiming]:
        """One result an input, in order. Cancelling the awaiting task stops the work."""
        return await self._answer(EmbedJob(request))

    async def score(self, request: ScoreRequest) -> tuple[list[ScoreResult], StepTiming]:
        """One result an item, in order. Cancelling the awaiting task stops the work."""
        return await self._answer(ScoreJob(request))

    async def classify(self, request: ClassifyRequest) -> tuple[list[ClassifyResult], StepTiming]:
        """One result an input, in order. Cancelling the awaiting task stops the work."""
        return await self._answer(ClassifyJob(request))

    @property
    def num_open(self) -> int:
        """Requests accepted and not yet ended."""
        return len(self._jobs)

    @property
    def num_blocks_used(self) -> int:
        blocks = self._scheduler.blocks
        return blocks.num_used if blocks is not None else 0

    @property
    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Stop the step thread; open requests end with ``NotReady``."""
        with self._condition:
            self._closed = True
            self._condition.notify()
        self._thread.join()

    async def _answer(self, job: Any) -> Any:
        self._submit(job)
        try:
            return await job.future
        except asyncio.CancelledError:
            self._cancel(job, None)
            raise

    def _submit(self, job: Job) -> None:
        most = max(len(sequence) for sequence in job.sequences) + job.num_new_tokens
        if most > self.info.context_length:
            limit = f"the model takes {self.info.context_length}"
            raise InvalidField("input", f"{most} tokens in all, {limit}")
        with self._condition:
            if self._closed:
                raise NotReady(f"model {self.info.name} is shutting down", retry_after_s=1.0)
            if len(self._jobs) >= self._max_queue_requests:
                wait = max(0.1, len(self._jobs) * self._seconds_a_request)
                limit = f"{self._max_queue_requests} requests are open, the most that this server takes"
                raise Overloaded(f"model {self.info.name}: {limit}", retry_after_s=wait)
            self._jobs.add(job)
            self._commands.append(lambda: self._scheduler.add(job.sequences))
            self._condition.notify()

    def _cancel(self, job: Job, index: int | None) -> None:
        with self._condition:
            self._commands.append(lambda: self._stop(job, index))
            self._condition.notify()

    # -- the step thread --------------------------------------------------------------------------

    def _loop(self) -> None:
        reason: PyruntimeError = NotReady(f"model {self.info.name} is shutting down", retry_after_s=1.0)
        try:
            while not self._closed:
                self._run_commands()
                self._step()
                self._outbox.send()
                with self._condition:
                    while not (self._closed or self._commands or self._scheduler.has_work):
                        self._condition.wait()
        except Exception:  # a bug in the bookkeeping: nobody may be left waiting for an answer
            log.critical("the step thread of model %s ended", self.info.name, exc_info=True)
            reason = ComputeFault(f"the engine of model {self.info.name} has failed")
            if self.on_failed is not None:
                self.on_failed(reason.message)
        with self._condition:
            self._closed = True
        for job in list(self._jobs):
            job.fail(reason)
            self._end(job)
            job.flush(self._outbox)
        self._outbox.send()

    def _run_commands(self) -> None:
        with self._condition:
            commands, self._commands = self._commands, deque()
        for command in commands:
            command()

    def _step(self) -> None:
        plan = self._scheduler.schedule()
        if not plan.entries:
            return
        self._mark_started(plan)
        batch = None
        try:
            with self._gate:
                batch = self._builder.build(plan)
                outputs = self._heads.read(self._runner.forward(batch), batch)
        except Exception as error:
            log.exception("step of model %s failed", self.info.name)
            self._fail_plan(plan, error)
            return
        self.num_steps += 1
        self._scheduler.advance(plan)
        self._deliver(batch, outputs)

    def _deliver(self, batch: ForwardBatch, outputs: list[Any]) -> None:
        touched: dict[Job, None] = {}
        reading = [row.sequence for row in batch.rows if row.reads]
        for sequence, output in zip(reading, outputs, strict=True):
            job = sequence.owner
            touched[job] = None
            if job.done:  # an earlier row of this step failed the request
                continue
            job.take(sequence, output, self._scheduler)
        for job in touched:
            if job.done:
                self._end(job)
            job.flush(self._outbox)

    def _mark_started(self, plan: StepPlan) -> None:
        now = time.monotonic()
        for sequence, _ in plan.entries:
            if sequence.first_run_at is None:
                sequence.first_run_at = now
                sequence.owner.started_at = sequence.owner.started_at or now

    def _fail_plan(self, plan: StepPlan, error: Exception) -> None:
        for job in {sequence.owner: None for sequence, _ in plan.entries}:
            self._fail(job, ComputeFault(f"the forward failed: {type(error).__name__}"))
            job.flush(self._outbox)
        self._scheduler.advance(StepPlan())

    def _stop(self, job: Job, index: int | None) -> None:
        if job not in self._jobs:
            return
        if index is None:
            job.abandon()
            for sequence in job.sequences:
                self._scheduler.drop(sequence)
            self._end(job)
            return
        self._scheduler.finish(job.sequences[index])
        job.close_index(index)
        if job.done:
            self._end(job)
        job.flush(self._outbox)

    def _fail(self, job: Job, error: PyruntimeError) -> None:
        for sequence in job.sequences:
            self._scheduler.drop(sequence)
        job.fail(error)
        self._end(job)

    def _end(self, job: Job) -> None:
        seconds = time.monotonic() - (job.started_at or job.submitted_at)
        with self._condition:
            self._jobs.discard(job)
            # Smoothed service time over the requests that ran together: the basis of RetryInfo.
            self._seconds_a_request += 0.1 * (seconds / (len(self._jobs) + 1) - self._seconds_a_request)
