"""Generate inside the engine: continuations that send events as they grow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from pyruntime.errors import ComputeFault, PyruntimeError
from pyruntime.jobs.base import Job
from pyruntime.jobs.outbox import Outbox
from pyruntime.scheduler.scheduler import Scheduler
from pyruntime.scheduler.sequence import Sequence
from pyruntime.types import FinishReason, GenerateRequest, SampledToken, StepTiming, Task, TokenEvent


class GenerateJob(Job):
    """``n`` continuations; those after the first fork from its computed prompt."""

    def __init__(self, request: GenerateRequest) -> None:
        first = Sequence(Task.GENERATE, list(request.prompt), request, 0, request.priority)
        others = [
            Sequence(Task.GENERATE, list(request.prompt), request, i, request.priority, parent=first)
            for i in range(1, request.n)
        ]
        super().__init__([first, *others])
        self.request = request
        self.events: asyncio.Queue[list[TokenEvent] | PyruntimeError | None] = asyncio.Queue()
        self._open = set(range(request.n))
        self._pending: list[TokenEvent] = []
        self._error: PyruntimeError | None = None
        self._abandoned = False

    @property
    def num_new_tokens(self) -> int:
        return self.request.stop.max_new_tokens

    @property
    def done(self) -> bool:
        return not self._open or self._error is not None

    def take(self, sequence: Sequence, output: Any, scheduler: Scheduler) -> None:
        if output is None:
            self._error = ComputeFault("the logits are not finite")
            for each in self.sequences:
                scheduler.drop(each)
            return
        token: SampledToken = output
        scheduler.append_token(sequence, token.token_id)
        finish = self._finish_reason(sequence, token.token_id)
        timing = None
        if finish is not None:
            scheduler.finish(sequence)
            self._open.discard(sequence.index)
            timing = self.timing()
        self._pending.append(
            TokenEvent(sequence.index, token.token_id, finish, sequence.cached_tokens, timing, token.logprob, token.top)
        )

    def _finish_reason(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        stop = self.request.stop
        if token_id in stop.token_ids and sequence.num_generated > stop.min_new_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if sequence.num_generated >= stop.max_new_tokens else None

    def fail(self, error: PyruntimeError) -> None:
        self._error = error

    def abandon(self) -> None:
        self._abandoned = True

    def close_index(self, index: int) -> None:
        self._open.discard(index)

    def flush(self, outbox: Outbox) -> None:
        if self._abandoned:
            return
        pending, self._pending = self._pending, []
        if pending:
            outbox.add(self.loop, self.events.put_nowait, pending)
        if self.done:
            outbox.add(self.loop, self.events.put_nowait, self._error)


class TokenStream:
    """What ``Engine.generate`` returns: event lists, one a wake-up, until every index has finished."""

    def __init__(self, job: GenerateJob, cancel: Callable[[Job, int | None], None]) -> None:
        self._job = job
        self._cancel = cancel

    async def __aiter__(self) -> AsyncIterator[list[TokenEvent]]:
        """Raises the request's ``PyruntimeError`` when it fails."""
        while (item := await self._job.events.get()) is not None:
            if isinstance(item, PyruntimeError):
                raise item
            yield item

    def cancel(self, index: int | None = None) -> None:
        """Stop one continuation, or all; idempotent. It sends no further events."""
        self._cancel(self._job, index)

    def timing(self) -> StepTiming:
        """How long the request waited and ran until now."""
        return self._job.timing()
