"""A request while it is inside the engine: its sequences, and how their outputs become its answer.

``take``, ``fail`` and ``flush`` run on the step thread. What a step has for the event loop goes through one
``Outbox``, so a loop is woken once a step, however many requests moved.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from pyruntime.errors import ComputeFault, InvalidField, PyruntimeError
from pyruntime.scheduler.scheduler import Scheduler
from pyruntime.scheduler.sequence import Sequence
from pyruntime.types import (
    EmbedRequest,
    EmbedResult,
    FinishReason,
    GenerateRequest,
    PoolingType,
    SampledToken,
    ScoreRequest,
    ScoreResult,
    StepTiming,
    Task,
    TokenEvent,
)

# The query stands before every item in the host's bookkeeping, though it is computed once: 8 bytes a token.
MAX_SCORE_TOKENS = 2**23


class Outbox:
    """Calls for event loops, collected on the step thread and sent together."""

    def __init__(self) -> None:
        self._calls: dict[asyncio.AbstractEventLoop, list[tuple[Callable[..., None], Any]]] = {}

    def add(self, loop: asyncio.AbstractEventLoop, function: Callable[[Any], None], argument: Any) -> None:
        self._calls.setdefault(loop, []).append((function, argument))

    def send(self) -> None:
        """Wake each loop once; a closed one has nobody left to tell."""
        for loop, calls in self._calls.items():
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_run, calls)
        self._calls = {}


def _run(calls: list[tuple[Callable[..., None], Any]]) -> None:
    for function, argument in calls:
        function(argument)


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


class BatchJob(Job):
    """A request that is answered whole, when its last sequence is done (Embed, Score)."""

    def __init__(self, sequences: list[Sequence], num_results: int) -> None:
        super().__init__(sequences)
        self.future: asyncio.Future[tuple[list[Any], StepTiming]] = self.loop.create_future()
        self._results: list[Any] = [None] * num_results
        self._num_missing = num_results
        self._error: PyruntimeError | None = None
        self._abandoned = False

    @property
    def done(self) -> bool:
        return self._num_missing == 0 or self._error is not None

    def take(self, sequence: Sequence, output: Any, scheduler: Scheduler) -> None:
        self._results[sequence.index] = self._result(sequence, output)
        self._num_missing -= 1
        scheduler.finish(sequence)

    def fail(self, error: PyruntimeError) -> None:
        self._error = error

    def abandon(self) -> None:
        self._abandoned = True

    def flush(self, outbox: Outbox) -> None:
        if self.done and not self._abandoned:
            outbox.add(self.loop, self._resolve, self.timing())

    def _resolve(self, timing: StepTiming) -> None:
        if self.future.done():
            return
        if self._error is not None:
            self.future.set_exception(self._error)
        else:
            self.future.set_result((self._results, timing))

    def _result(self, sequence: Sequence, output: Any) -> Any:
        raise NotImplementedError


class EmbedJob(BatchJob):
    def __init__(self, request: EmbedRequest) -> None:
        types: list[Any] = request.token_type_ids or [None] * len(request.inputs)
        sequences = [
            Sequence(
                Task.EMBED,
                list(ids),
                request,
                index,
                request.priority,
                token_type_ids=kinds,
                # MEAN and CLS read hidden rows that a cached prefix does not give.
                reuses_prefix=request.pooling is PoolingType.LAST,
            )
            for index, (ids, kinds) in enumerate(zip(request.inputs, types, strict=True))
        ]
        super().__init__(sequences, len(sequences))

    def _result(self, sequence: Sequence, output: Any) -> EmbedResult:
        error = ComputeFault("the embedding is not finite") if output is None else None
        return EmbedResult(output, sequence.num_prompt, sequence.cached_tokens, error)


class ScoreJob(BatchJob):
    """Items behind a common prefix fork from one sequence that computes the prefix once."""

    def __init__(self, request: ScoreRequest) -> None:
        total = sum(len(request.prefix) + len(item) for item in request.items)
        if total > MAX_SCORE_TOKENS:
            problem = f"with the query before each they are {total} tokens; allowed: at most {MAX_SCORE_TOKENS}"
            raise InvalidField("items", problem)
        shared = len(request.items) > 1 and len(request.prefix) > 0
        prefix = Sequence(Task.SCORE, list(request.prefix), request, -1, request.priority, is_prefix=True)
        items = [
            Sequence(Task.SCORE, request.prefix + item, request, i, request.priority, parent=prefix if shared else None)
            for i, item in enumerate(request.items)
        ]
        super().__init__([prefix, *items] if shared else items, len(items))

    def _result(self, sequence: Sequence, output: Any) -> ScoreResult:
        error = ComputeFault("the scores are not finite") if output is None else None
        return ScoreResult(output or [], sequence.num_prompt, sequence.cached_tokens, error)


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
