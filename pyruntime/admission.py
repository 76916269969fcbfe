"""Whether a request may come in: bounds on requests, queued tokens and the time they take, deadlines that can be met.

Decided twice: before tokenising, from what is known then (``Admission.admit``), and with the exact tokens when the
request is handed to the engine (``Admission.enter``). Every method may be called from any thread.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable

from pyruntime.errors import DeadlinePassed, Overloaded
from pyruntime.overload import Rate, Standing
from pyruntime.types import Task

# Told to refused clients as long as no rate is known, and the bounds of what is told afterwards, in seconds.
UNKNOWN_RETRY_S = 1.0
RETRY_RANGE_S = (0.05, 60.0)
# Of a bound that was met, this much should be free again before a refused client comes back, so that not all but one
# of those who come back are refused once more.
ROOM_ON_RETRY = 1 / 16
# Tokens a byte of text: the first guess, and the range of what is believed. English has about 0.22, and no tokenizer
# makes more tokens than bytes apart from a few special ones.
TOKENS_PER_BYTE = 0.2
TOKENS_PER_BYTE_RANGE = (1 / 16, 1.0)
# A text may well have half as many tokens as the mean text of its length: only those are held against it.
CERTAIN_SHARE = 0.5
# Of the time that a deadline leaves, so much may go to the work that comes first; the rest is for tokenising, the event
# loop and the way back. Without it a queue that is as long as the deadlines would end every request just too late. A
# request that has been tokenised is refused only if all of its time is too little: its tokenising would be wasted.
SHARE_FOR_QUEUE = 0.75
# A queue that stands makes everybody later and nothing faster. So while one does, a request with a deadline comes in
# only if what comes first takes no more than a share of its time, or a quarter of a second, or so many times as long as
# what is certain of the request itself.
SHARE_STANDING = 1 / 8
LEAST_STANDING_S = 0.25
TIMES_OWN_WORK = 4
# Of a standing queue's bound, this much should be free again before a refused client comes back.
ROOM_ON_RETRY_STANDING = 1 / 2
# Texts shorter than this, in bytes, are mostly special tokens and say nothing about the tokenizer.
TELLING_BYTES = 64
LEARNING_RATE = 0.05

# Those that wait in one line are served first come, first served.
Line = tuple[Task, int]


class Ticket:
    """A request's place, from before its tokenising until its answer is sent. A context manager that gives it back.

    ``deadline``: when the client stops waiting, on the clock of ``time.monotonic``; None for never.
    """

    def __init__(self, admission: Admission, line: Line, estimate: int, num_bytes: int, deadline: float | None) -> None:
        self.line = line
        self.taken_at = time.monotonic()
        self.deadline = deadline
        self.estimate = estimate  # tokens that are not known exactly yet
        self.num_bytes = num_bytes  # of the text that they come from; 0 when that tells nothing about the tokenizer
        self.is_open = True
        self.has_run = False  # something of the request has been computed
        self._admission = admission

    def __enter__(self) -> Ticket:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Give the place back; idempotent."""
        self._admission.release(self)


class Admission:
    """The bounds of one model.

    max_requests: requests that are open at once, from before their tokenising until their last answer.
    max_tokens: prompt tokens that wait to be computed, those of texts still to be tokenised included. A request that
    alone has more is let in when nothing else waits, since otherwise it could never be served.
    max_time_s: seconds that what comes first may take for a request without a deadline; 0 for any.
    """

    def __init__(
        self,
        name: str,
        max_requests: int,
        max_tokens: int,
        max_time_s: float = 0.0,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._max_time_s = max_time_s
        self._clock = clock
        self._lock = threading.Lock()
        self._num_open = 0
        self._num_estimated = 0
        self._queued: dict[Line, int] = {}
        self._estimated: dict[Line, int] = {}
        self._num_queued = 0
        self._tokens_per_byte = TOKENS_PER_BYTE
        self._token_rate = Rate()
        self._request_rate = Rate()
        self._standing = {task: Standing() for task in Task}
        # When the last step ended that left tokens waiting, as long as some have waited ever since.
        self._waits_since: float | None = None

    @property
    def num_open(self) -> int:
        """Requests that have a place."""
        return self._num_open

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens that wait to be computed, with the estimates for texts still to be tokenised."""
        return self._num_queued + self._num_estimated

    @property
    def num_known_tokens(self) -> int:
        """Of them, those of texts that are tokenised."""
        return self._num_queued

    @property
    def tokens_per_s(self) -> float | None:
        """Queued tokens done with in a second while more waited, those that the prefix cache held included; None while
        not known.
        """
        return self._token_rate.per_s

    # -- requests ---------------------------------------------------------------------------------

    def admit(
        self,
        task: Task,
        priority: int = 0,
        *,
        num_bytes: int = 0,
        num_ids: int = 0,
        deadline: float | None = None,
    ) -> Ticket:
        """A place for a request of ``num_bytes`` bytes of text and ``num_ids`` token ids.

        The tokens of the text are estimated from the running mean of tokens a byte that this model's tokenizer made of
        earlier texts, and half of that is counted, so that nothing is refused that would have fitted.
        Raises ``Overloaded`` when a bound is met, ``DeadlinePassed`` when the deadline cannot be.
        """
        line = (task, priority)
        with self._lock:
            estimate = num_ids + int(num_bytes * self._tokens_per_byte * CERTAIN_SHARE)
            self._check_deadline(line, deadline, share=SHARE_FOR_QUEUE)
            if self._num_open >= self._max_requests:
                limit = f"{self._max_requests} requests are open, the most that this server takes"
                raise self._overloaded(limit, 1 + ROOM_ON_RETRY * self._max_requests, self._request_rate)
            self._check_tokens(estimate)
            self._check_time(line, deadline, estimate)
            self._num_open += 1
            self._expect(line, estimate)
            telling = num_bytes if num_ids == 0 and num_bytes >= TELLING_BYTES else 0
            return Ticket(self, line, estimate, telling, deadline)

    def enter(self, ticket: Ticket, num_tokens: int, least_tokens: int = 0) -> None:
        """The request's tokens are known and wait from now on, until ``leave``.

        ``least_tokens``: of them, those that have to be computed whatever the prefix cache holds.
        Raises as ``admit`` does.
        """
        with self._lock:
            self._settle(ticket)
            self._check_deadline(ticket.line, ticket.deadline, least_tokens)
            self._check_tokens(num_tokens)
            if ticket.num_bytes:
                low, high = TOKENS_PER_BYTE_RANGE
                seen = min(max(num_tokens / ticket.num_bytes, low), high)
                self._tokens_per_byte += LEARNING_RATE * (seen - self._tokens_per_byte)
                ticket.num_bytes = 0
            self._queued[ticket.line] = self._queued.get(ticket.line, 0) + num_tokens
            self._num_queued += num_tokens

    def leave(self, line: Line, num_tokens: int) -> None:
        """So many tokens wait no more: they were computed, found in the prefix cache or given up."""
        with self._lock:
            self._num_queued -= num_tokens
            _take(self._queued, line, num_tokens)
            if not self._num_queued:
                self._waits_since = None

    def release(self, ticket: Ticket) -> None:
        """The request has ended."""
        with self._lock:
            if ticket.is_open:
                ticket.is_open = False
                self._num_open -= 1
                self._settle(ticket)

    def note(self, num_tokens: int, num_requests: int, seconds: float, left_some: bool) -> None:
        """A step has just ended: queued tokens done with, requests ended. ``left_some``: more tokens waited for it.

        What waited since the step before has waited for the steps of other models too, so that time counts as well.
        """
        with self._lock:
            now = self._clock()
            if self._waits_since is not None:
                seconds = max(seconds, now - self._waits_since)
            self._waits_since = now if left_some and self._num_queued else None
            self._request_rate.note(num_requests, seconds)
            if left_some:
                self._token_rate.note(num_tokens, seconds)
            else:  # it took all there was: its rate is what the clients send, not what the model can do
                self._token_rate.fade(seconds)

    # -- under the lock ---------------------------------------------------------------------------

    def _expect(self, line: Line, num_tokens: int) -> None:
        self._num_estimated += num_tokens
        self._estimated[line] = self._estimated.get(line, 0) + num_tokens

    def _settle(self, ticket: Ticket) -> None:
        """The ticket's estimate counts no more."""
        self._num_estimated -= ticket.estimate
        _take(self._estimated, ticket.line, ticket.estimate)
        ticket.estimate = 0

    def _check_tokens(self, num_tokens: int) -> None:
        waiting = self._num_queued + self._num_estimated
        excess = waiting + num_tokens - self._max_tokens
        if waiting > 0 and excess > 0:
            limit = f"{waiting} tokens wait; allowed with this request's {num_tokens}: {self._max_tokens}"
            raise self._overloaded(limit, min(waiting, excess + ROOM_ON_RETRY * self._max_tokens), self._token_rate)

    def _check_deadline(self, line: Line, deadline: float | None, least_tokens: int = 0, share: float = 1.0) -> None:
        """Counts only what is sure to go first, and nothing while the rate is a guess."""
        if deadline is None:
            return
        remaining = deadline - self._clock()
        if remaining <= 0:
            raise DeadlinePassed("the deadline passed before the request was queued")
        rate = self._token_rate.per_s
        if rate is None:
            return
        ahead = self._ahead(line)
        if (ahead + least_tokens) / rate > remaining * share:
            work = f"{ahead + least_tokens} tokens come first, at {rate:.0f} a second"
            raise DeadlinePassed(f"the deadline in {remaining:.3f} s cannot be met: {work}")

    def _check_time(self, line: Line, deadline: float | None, estimate: int) -> None:
        """Nothing while the rate is a guess."""
        rate = self._token_rate.per_s
        if rate is None or (deadline is None and not self._max_time_s):
            return
        ahead, now = self._ahead(line), self._clock()
        if deadline is None:
            bound, room = self._max_time_s, ROOM_ON_RETRY
        else:
            shares = LEAST_STANDING_S, SHARE_STANDING * (deadline - now), TIMES_OWN_WORK * estimate / rate
            bound, room = max(shares), ROOM_ON_RETRY_STANDING
        if ahead / rate > bound and (deadline is None or self._standing[line[0]].met(now)):
            limit = f"{ahead} tokens come first, {ahead / rate:.2f} s of work; allowed: {bound:.2f} s"
            raise self._overloaded(limit, ahead - (1 - room) * bound * rate, self._token_rate)

    def _ahead(self, line: Line) -> int:
        """Tokens that are sure to go first."""
        task, priority = line
        lines = itertools.chain(self._queued.items(), self._estimated.items())
        return sum(n for (other, rank), n in lines if other is task and rank >= priority)

    def _overloaded(self, problem: str, amount: float, rate: Rate) -> Overloaded:
        per_s = rate.per_s
        low, high = RETRY_RANGE_S
        wait = UNKNOWN_RETRY_S if per_s is None else min(max(amount / per_s, low), high)
        return Overloaded(f"model {self._name}: {problem}", retry_after_s=wait)


def _take(counts: dict[Line, int], line: Line, num_tokens: int) -> None:
    """Priorities are the clients' to choose, so a line without tokens is forgotten."""
    left = counts.get(line, 0) - num_tokens
    if left > 0:
        counts[line] = left
    else:
        counts.pop(line, None)
