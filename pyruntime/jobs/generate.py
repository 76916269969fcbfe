"""Generate inside the engine: continuations that send events as they grow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

from pyruntime.errors import ComputeFault, InvalidField, PyruntimeError
from pyruntime.jobs.base import Job
from pyruntime.jobs.outbox import Outbox
from pyruntime.scheduler.scheduler import Scheduler
from pyruntime.scheduler.sequence import Sequence
from pyruntime.scheduler.tokens import SharedTokens
from pyruntime.types import FinishReason, GenerateRequest, SampledToken, StepTiming, Task, TokenEvent

# Some seconds of a fast stream: enough that no client who reads is ever paused.
BUFFER_TOKENS = 256

# Events that are handed over together, since they become one message of bounded size for each continuation.
MOST_TAKEN = 64


class Inbox:
    """A stream's events on the client's side. Used on its event loop; ``num_taken`` may be read anywhere.

    ``on_change`` is called whenever ``take`` may have something new to say.
    """

    def __init__(self) -> None:
        self.num_taken = 0
        self.on_change: Callable[[], None] = _nobody
        self._events: list[TokenEvent] = []
        self._ended = False
        self._error: PyruntimeError | None = None

    def put(self, events: list[TokenEvent]) -> None:
        self._events += events
        self.on_change()

    def end(self, error: PyruntimeError | None) -> None:
        """Nothing more comes; ``error`` says why, when that is not the regular end."""
        self._ended, self._error = True, error
        self.on_change()

    def take(self) -> list[TokenEvent] | None:
        """What is there, None while there is nothing; empty at the end, where the error is raised."""
        events = self._events
        if len(events) > MOST_TAKEN:
            self._events = events[MOST_TAKEN:]
            return events[:MOST_TAKEN]
        if events:
            self._events = []
            return events
        if self._error is not None:
            raise self._error
        return events if self._ended else None


def _nobody() -> None:
    """Nobody listens yet."""


class GenerateJob(Job):
    """``n`` continuations; those after the first fork from its computed prompt.

    ``buffer_tokens``: tokens of a continuation that may wait for the client; with more of them the job is behind, and
    the engine pauses it until it has caught up. Fewer when each comes with log-probabilities of others.
    """

    def __init__(self, request: GenerateRequest, buffer_tokens: int = BUFFER_TOKENS) -> None:
        first = Sequence(Task.GENERATE, list(request.prompt), request, 0, request.priority)
        # Cached keys and values come without the hidden rows that the prompt's log-probabilities are read from.
        first.reuses_prefix = request.prompt_logprobs is None
        first.row_reads = _row_reads(request)
        others = [
            Sequence(Task.GENERATE, SharedTokens(request.prompt, []), request, i, request.priority, parent=first)
            for i in range(1, request.n)
        ]
        super().__init__([first, *others])
        for sequence in self.sequences:
            sequence.draft_limit = len(request.prompt) + request.stop.max_new_tokens
        if request.constraint is not None:
            for sequence in self.sequences:
                sequence.matcher = request.constraint.matcher(request.stop.token_ids)
        self.request = request
        self.inbox = Inbox()
        self._most_buffered = max(1, buffer_tokens // _token_weight(request)) * request.n
        self._num_sent = 0
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

    @property
    def is_behind(self) -> bool:
        return self._num_sent - self.inbox.num_taken > self._most_buffered

    @property
    def has_caught_up(self) -> bool:
        """At half of what makes it fall behind, so that it does not start and stop with every token."""
        return self._num_sent - self.inbox.num_taken <= self._most_buffered // 2

    def take(self, sequence: Sequence, output: Any, scheduler: Scheduler) -> None:
        drawn: list[SampledToken | None] = [output] if output is None else [output, *output.following]
        for place, token in enumerate(drawn, 1):
            if token is None:
                error = self._why_nothing_was_drawn(sequence)
                if isinstance(error, ComputeFault):  # what the cache holds is no cause of a request's own mistakes
                    scheduler.distrust(sequence)
                self._give_up(error, scheduler)
            else:
                scheduler.append_token(sequence, token.token_id, was_drafted=place < len(drawn))
                self._grow(sequence, token, scheduler, is_newest=place == len(drawn))
            if self.done or sequence.index not in self._open:  # what was drawn behind the end does not count
                return

    def _grow(self, sequence: Sequence, token: SampledToken, scheduler: Scheduler, is_newest: bool) -> None:
        """A continuation has one token more: tell its client, and end it if that was the last."""
        # The prompt has been read, should it be computed again.
        sequence.reuses_prefix, sequence.row_reads, sequence.partial_hidden = True, 0, []
        stop, matcher, token_id = self.request.stop, sequence.matcher, token.token_id
        if token_id in stop.token_ids and sequence.num_generated > stop.min_new_tokens:
            self._send(sequence, token, FinishReason.STOP, scheduler)
        elif matcher is None:
            self._send(sequence, token, self._length_reached(sequence), scheduler)
        elif is_newest and matcher.is_costly:
            self._send(sequence, token, None, scheduler)
            sequence.is_followed = True
            scheduler.pause(sequence)
            assert self.settled is not None
            matcher.advance_aside(token_id, partial(self.settled, sequence))
        else:
            self._follow(sequence, token, lambda: matcher.advance(token_id), scheduler)

    def settle(self, sequence: Sequence, scheduler: Scheduler) -> None:
        sequence.is_followed = False
        if sequence.index not in self._open:
            return
        self._follow(sequence, None, sequence.matcher.settled, scheduler)
        if not self.paused:
            scheduler.resume(sequence)

    def _follow(
        self, sequence: Sequence, token: SampledToken | None, move: Callable[[], bool], scheduler: Scheduler
    ) -> None:
        """The constraint moves on with the newest token, which is sent unless that has been done."""
        try:
            is_complete = move()
        except InvalidField as error:  # the constraint leaves nothing to go on with
            self._give_up(error, scheduler)
            return
        finish = FinishReason.STOP if is_complete else self._length_reached(sequence)
        if token is not None:  # it is text, so the end of a complete one comes as an event of its own
            self._send(sequence, token, None if is_complete else finish, scheduler)
        if is_complete or (token is None and finish is not None):
            self._send(sequence, None, finish, scheduler)

    def _length_reached(self, sequence: Sequence) -> FinishReason | None:
        return FinishReason.LENGTH if sequence.num_generated >= self.request.stop.max_new_tokens else None

    def _send(
        self, sequence: Sequence, token: SampledToken | None, finish: FinishReason | None, scheduler: Scheduler
    ) -> None:
        timing = None
        if finish is not None:
            scheduler.finish(sequence)
            self._open.discard(sequence.index)
            timing = self.timing()
        index, cached = sequence.index, sequence.cached_tokens
        if token is None:
            self._pending.append(TokenEvent(index, None, finish, cached, timing))
        else:
            details = token.logprob, token.top, token.selected, token.prompt
            self._pending.append(TokenEvent(index, token.token_id, finish, cached, timing, *details))

    def _why_nothing_was_drawn(self, sequence: Sequence) -> PyruntimeError:
        stop, matcher = self.request.stop, sequence.matcher
        too_few = sequence.num_generated < stop.min_new_tokens
        if matcher is not None and too_few and not matcher.allows_any_but(stop.token_ids):
            problem = f"{stop.min_new_tokens} cannot be reached: after {sequence.num_generated} tokens"
            return InvalidField("stop.min_new_tokens", f"{problem} the constraint lets only stop tokens follow")
        return ComputeFault("the logits are not finite")

    def _give_up(self, error: PyruntimeError, scheduler: Scheduler) -> None:
        self._error = error
        self.drop(scheduler)

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
            self._num_sent += len(pending)
            outbox.add(self.loop, self.inbox.put, pending)
        if self.done:
            outbox.add(self.loop, self.inbox.end, self._error)


def _row_reads(request: GenerateRequest) -> int:
    """Of each prompt row: the log-probability of the token that follows takes one reading, the likeliest another."""
    return 0 if request.prompt_logprobs is None else 1 + (request.prompt_logprobs > 0)


def _token_weight(request: GenerateRequest) -> int:
    """Plain tokens that take as much memory as one of these: two log-probabilities make one, about."""
    return 1 + ((request.sampling.logprobs or 0) + len(request.sampling.logprob_ids)) // 2


class TokenStream:
    """What ``Engine.generate`` returns: lists of the events since the last one, until every index has finished.

    Either iterated over, or taken from whenever ``listen``'s callback has been called; both raise the request's
    ``PyruntimeError`` when it fails. Events count as taken when the next ones are asked for: a consumer that waits for
    its own client holds the work back.
    """

    def __init__(
        self,
        job: GenerateJob,
        cancel: Callable[[Job, int | None], None],
        resume: Callable[[Job], None],
    ) -> None:
        self._job = job
        self._cancel = cancel
        self._resume = resume
        self._num_given = 0

    async def __aiter__(self) -> AsyncIterator[list[TokenEvent]]:
        changed = asyncio.Event()
        self.listen(changed.set)
        while (events := self.take()) != []:
            if events is None:
                changed.clear()
                await changed.wait()
            else:
                yield events

    def listen(self, on_change: Callable[[], None]) -> None:
        """From now on ``on_change`` is called, on the event loop, when ``take`` may have something new to say."""
        self._job.inbox.on_change = on_change

    def take(self) -> list[TokenEvent] | None:
        """The events since the last ones, which now count as taken; None while there are none, empty at the end."""
        job = self._job
        job.inbox.num_taken += self._num_given
        self._num_given = 0
        if job.paused and job.has_caught_up:
            self._resume(job)
        events = job.inbox.take()
        self._num_given = len(events or ())
        return events

    def cancel(self, index: int | None = None) -> None:
        """Stop one continuation, or all; idempotent. It sends no further events."""
        self._cancel(self._job, index)

    def timing(self) -> StepTiming:
        """How long the request waited and ran until now."""
        return self._job.timing()
