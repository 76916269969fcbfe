"""What one model does on the step thread: takes commands between steps, runs steps, hands results to event loops."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from pyruntime.admission import Admission
from pyruntime.deadlines import Deadlines
from pyruntime.errors import ComputeFault, DeadlinePassed, NotReady, PyruntimeError
from pyruntime.jobs.base import Job
from pyruntime.jobs.outbox import Outbox
from pyruntime.scheduler.load import SchedulerLoad
from pyruntime.scheduler.plan import StepPlan
from pyruntime.scheduler.scheduler import Scheduler
from pyruntime.scheduler.sequence import Sequence
from pyruntime.stats import EngineStats
from pyruntime.step_runner import DeviceLost, Outcome, StepRunner
from pyruntime.step_thread import ENDED, StepThread
from pyruntime.types import ModelInfo, Task

log = logging.getLogger(__name__)

# A plan may be empty although something waits; then the step thread looks again after this long, or when told.
LOOK_AGAIN_S = 0.02
# How old the published figures may get while steps run.
LOAD_AGE_S = 0.25


class StepLoop:
    """Everything that happens to jobs between their arrival and their end happens in its turns on ``thread``.

    ``on_failed`` is told the reason when something ends it, before the open jobs are answered;
    ``on_device_lost`` after that, when it was the device.
    """

    def __init__(
        self,
        info: ModelInfo,
        scheduler: Scheduler,
        steps: StepRunner,
        admission: Admission,
        stats: EngineStats,
        thread: StepThread,
        on_failed: Callable[[str], None],
        on_device_lost: Callable[[str], None],
    ) -> None:
        self._info = info
        self._scheduler = scheduler
        self._steps = steps
        self._admission = admission
        self._stats = stats
        self._on_failed = on_failed
        self._on_device_lost = on_device_lost
        self._lock = threading.Lock()
        self._commands: deque[Callable[[], None]] = deque()
        self._jobs: set[Job] = set()
        self._deadlines = Deadlines()
        self._outbox = Outbox()
        self._num_ended = 0
        self.num_steps = 0
        self.scheduler_load: SchedulerLoad = scheduler.load()
        self._load_at = 0.0
        self.is_closed = False
        self._refusal: PyruntimeError | None = None
        self._thread = thread
        thread.add(self)

    # -- called from event loops ------------------------------------------------------------------

    @property
    def num_open(self) -> int:
        return len(self._jobs)

    def submit(self, job: Job, at_once: bool = False) -> None:
        """Raises ``NotReady`` when closed, and as ``Admission.enter``. ``at_once``: its first step may run in here."""
        assert job.ticket is not None
        job.settled = lambda sequence: self.command(lambda: self._settle(job, sequence))
        with self._lock:
            if self.is_closed:
                raise self.not_ready()
            if self._refusal is not None and not job.has_run:
                raise self._refusal
            self._admission.enter(job.ticket, job.num_unread, job.num_unread_certain)
            self._jobs.add(job)
            self._commands.append(lambda: self._begin(job))
            at_once = at_once and len(self._jobs) == 1
        if not (at_once and self._thread.try_turn(self)):
            self._thread.wake()

    def cancel(self, job: Job, index: int | None) -> None:
        """Stop one continuation, or the whole job, before the next step; idempotent."""
        self.command(lambda: self._stop(job, index))

    def caught_up(self, job: Job) -> None:
        """The client of a paused job has taken what waited for it."""
        self.command(lambda: self._resume(job))

    def turn_away(self, error: PyruntimeError) -> None:
        """From now on, requests of which nothing has been computed end with ``error``; the others go on."""

        def fail_queued() -> None:
            for job in [each for each in self._jobs if not each.has_run]:
                self._fail(job, error)

        self._refusal = error
        self.command(fail_queued)

    def close(self) -> None:
        """Take no more turns; open jobs end with ``NotReady``. Not to be called on the thread."""
        self.is_closed = True
        self._thread.wake()
        self._thread.wait_for_end(self)

    def not_ready(self) -> NotReady:
        return NotReady(f"model {self._info.name} is shutting down", retry_after_s=1.0)

    def command(self, command: Callable[[], None]) -> None:
        """Have something called on the thread before its next step."""
        self._commands.append(command)
        self._thread.wake()

    # -- the thread -------------------------------------------------------------------------------

    def turn(self) -> float | None:
        """As ``Member.turn``: commands, a step if something can run, and what they have for event loops."""
        try:
            if not self.is_closed:
                return self._work()
            self._end_all(self.not_ready())
        except BaseException as error:  # a bug in the bookkeeping, or a lost device
            self._break_down(error)
        return ENDED

    def _work(self) -> float | None:
        """Seconds until there is something to do: a step, or a deadline that passes."""
        self._run_commands()
        self._end_late_jobs()
        has_run = self._step()
        self._publish_load()  # first, so that whoever has an answer finds its blocks returned
        self._outbox.send()
        seconds = self._deadlines.seconds_left(time.monotonic())
        if self._scheduler.has_work:
            pause = 0.0 if has_run else LOOK_AGAIN_S
            seconds = pause if seconds is None else min(seconds, pause)
        return seconds

    def _break_down(self, error: BaseException) -> None:
        """Nobody may be left without an answer."""
        log.critical("the step thread of model %s ended", self._info.name, exc_info=error)
        is_lost = isinstance(error, DeviceLost)
        reason = ComputeFault(f"the {'device' if is_lost else 'engine'} of model {self._info.name} has failed")
        self._on_failed(reason.message)
        self._end_all(reason)
        if is_lost:
            self._on_device_lost(f"{self._info.device}: {error}")

    def _end_all(self, reason: PyruntimeError) -> None:
        with self._lock:
            self.is_closed = True
        for job in list(self._jobs):
            job.fail(reason)
            self._end(job)
            job.flush(self._outbox)
        self._outbox.send()

    def _run_commands(self) -> None:
        for _ in range(len(self._commands)):  # and not those that come meanwhile, or there might be no step
            self._commands.popleft()()

    def _publish_load(self) -> None:
        """The scheduler is the step thread's alone, so others read a copy."""
        now = time.monotonic()
        if now - self._load_at > LOAD_AGE_S or not self._scheduler.has_work:
            self.scheduler_load, self._load_at = self._scheduler.load(), now

    def _begin(self, job: Job) -> None:
        self._scheduler.add(job.sequences)
        self._deadlines.add(job)

    def _end_late_jobs(self) -> None:
        for job in self._deadlines.passed(time.monotonic()):
            self._fail(job, DeadlinePassed("the deadline passed before the answer was ready"))

    def _step(self) -> bool:
        """One step; False when there was nothing that could run."""
        plan = self._scheduler.schedule()
        if not plan.entries:
            return False
        began = time.monotonic()
        self._mark_started(plan, began)
        num_waiting = self._admission.num_known_tokens
        outcome = self._steps.run(plan)
        self.num_steps += 1
        for job, error in outcome.failed.items():
            self._fail(job, ComputeFault(f"the forward failed: {type(error).__name__}"))
        self._scheduler.advance(plan)
        num_read = self._leave_queue(plan)
        self._deliver(outcome)
        ended, self._num_ended = self._num_ended, 0
        seconds = time.monotonic() - began
        self._admission.note(num_read, ended, seconds, left_some=num_waiting > num_read)
        self._stats.note_step(plan, seconds, len(outcome.failed))
        return True

    def _leave_queue(self, plan: StepPlan) -> int:
        """Prompt tokens that the step has done with wait no more; how many they are."""
        total = 0
        for sequence, num_computed in plan.entries:
            job: Job = sequence.owner
            if job.unread and (num_tokens := job.note_computed(sequence)):
                assert job.ticket is not None
                self._admission.leave(job.ticket.line, num_tokens)
                self._stats.note_prompt(sequence.task, num_tokens, num_computed)
                total += num_tokens
        return total

    def _deliver(self, outcome: Outcome) -> None:
        touched: dict[Job, None] = {}
        now = time.monotonic()
        for sequence, output in outcome.outputs:
            job = sequence.owner
            touched[job] = None
            if not job.done:  # else another row of this step failed the request
                job.take(sequence, output, self._scheduler)
                if sequence.task is Task.GENERATE:
                    self._stats.note_tokens(job, sequence, now)
        for job in touched:
            self._answer(job)

    def _answer(self, job: Job) -> None:
        """What a job has taken goes to its client; the job ends when that was all."""
        if job not in self._jobs:
            return
        if job.done:
            self._stats.note_end(job)
            self._end(job)
        job.flush(self._outbox)
        if job.is_behind and not (job.done or job.paused):
            self._pause(job)

    def _settle(self, job: Job, sequence: Sequence) -> None:
        if job in self._jobs and not job.done:
            job.settle(sequence, self._scheduler)
            self._answer(job)

    def _mark_started(self, plan: StepPlan, now: float) -> None:
        for sequence, _ in plan.entries:
            if sequence.first_run_at is None:
                sequence.first_run_at = now
                job: Job = sequence.owner
                if job.started_at is None:
                    job.started_at = now
                    job.note_run()
                    self._stats.note_start(job, now)

    def _pause(self, job: Job) -> None:
        self._stats.note_pause(job)
        job.pause(self._scheduler)
        if job.has_caught_up:  # while that was being said, so that the client's side did not see it
            self._resume(job)

    def _resume(self, job: Job) -> None:
        if job in self._jobs and job.paused and job.has_caught_up:
            job.resume(self._scheduler)

    def _stop(self, job: Job, index: int | None) -> None:
        if job not in self._jobs:
            return
        if index is None:
            job.abandon()
            job.drop(self._scheduler)
            self._end(job)
            return
        self._scheduler.finish(job.sequences[index])
        job.close_index(index)
        self._answer(job)

    def _fail(self, job: Job, error: PyruntimeError) -> None:
        job.drop(self._scheduler)
        job.fail(error)
        self._end(job)
        job.flush(self._outbox)

    def _end(self, job: Job) -> None:
        assert job.ticket is not None
        with self._lock:
            self._jobs.discard(job)
        self._deadlines.discard(job)
        self._num_ended += 1
        self._admission.leave(job.ticket.line, job.num_unread)
        job.unread = {}
        if job.owns_ticket:
            job.ticket.release()
