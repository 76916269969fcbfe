"""Which failed calls are sent again, and when."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real

from pyruntime.client.errors import ApiError
from pyruntime.client.fields import shown

# The most that a wait which the server asked for is lengthened, as a share of it, so that not all come back at once.
_SPREAD = 0.25
# Three years.
_LONGEST_S = 1e8
# A server that says "at once" is not asked in a tight loop.
_LEAST_S = 0.05


@dataclass(frozen=True)
class Retry:
    """When a call that the server could not take is sent again. Every method may be: asking twice changes nothing.

    Sent again is what ended UNAVAILABLE (no connection, loading, draining), and RESOURCE_EXHAUSTED where the server
    says when to come back (RetryInfo). A stream is, until its first message has come; a bulk one goes on where it
    broke off. The wait is what RetryInfo says, lengthened at random by up to a quarter; without one it doubles from
    ``first_wait_s`` to ``most_wait_s``, shortened at random by up to half. Nothing is tried beyond a call's deadline.

    attempts     of one call at most, the first included; 1: never again
    total_s      no attempt begins later than this after the first one
    patience_s   as ``total_s``, of bulk work at a server that has answered before: since the last answer, and however
                 many attempts that takes
    on_wait      told before each wait what has failed, and how many seconds are waited; to log it, for example
    """

    attempts: int = 5
    total_s: float = 30.0
    first_wait_s: float = 0.2
    most_wait_s: float = 5.0
    patience_s: float = 300.0
    on_wait: Callable[[ApiError, float], None] | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "on_wait" and not isinstance(value, Real):
                raise TypeError(f"{name} of Retry must be a number, not {shown(value)}")
        if self.attempts < 1:
            raise ValueError(f"attempts must be 1 or more, not {self.attempts}")
        if min(self.total_s, self.first_wait_s, self.most_wait_s, self.patience_s) < 0:
            raise ValueError("the times of Retry must be 0 or more")


NEVER = Retry(attempts=1)


def checked_retry(retry: Retry | None) -> Retry:
    if not isinstance(retry, Retry | None):
        raise TypeError(f"retry must be a Retry, not {shown(retry)}")
    return Retry() if retry is None else retry


def checked_timeout(timeout_s: float) -> float:
    """Seconds that gRPC can count: far more than that would come out as a deadline that has passed.

    TypeError and ValueError for what is no time. Below 0 is one: a deadline of the caller's that has passed.
    """
    if not isinstance(timeout_s, Real) or isinstance(timeout_s, bool):
        raise TypeError(f"timeout_s must be a number of seconds, not {shown(timeout_s)}")
    if math.isnan(timeout_s):
        raise ValueError("timeout_s must be a number of seconds, not nan")
    return min(float(timeout_s), _LONGEST_S)


class Attempts:
    """The attempts of one call.

    timeout_s   of all attempts together; None: no deadline
    bulk        it is, or is part of, work that goes on behind what was answered
    reached     the server has answered before: a wrong address is not tried for as long as a server that restarts
    """

    def __init__(
        self,
        retry: Retry,
        timeout_s: float | None,
        *,
        bulk: bool = False,
        reached: bool = True,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._retry = retry
        self._bulk = bulk
        self._is_patient = bulk and reached
        self._clock = clock
        self._draw = draw
        self._deadline = None if timeout_s is None else clock() + checked_timeout(timeout_s)
        self._began = clock()
        self._failed = 0

    def answered(self) -> None:
        """Something came back: what fails from now on is a trouble of its own."""
        self._began = self._clock()
        self._failed = 0
        self._is_patient = self._bulk

    def remaining_s(self) -> float | None:
        """The timeout of the next attempt in seconds."""
        return None if self._deadline is None else max(self._deadline - self._clock(), 0.0)

    def wait_s(self, error: ApiError) -> float:
        """Seconds to wait before the next attempt. Raises ``error`` when there is to be none."""
        self._failed += 1
        enough = self._retry.attempts == 1 if self._is_patient else self._failed >= self._retry.attempts
        if enough or not may_succeed_later(error):
            raise error
        wait_s = self._next_wait_s(error)
        most_s = self._retry.patience_s if self._is_patient else self._retry.total_s
        begins = self._clock() + wait_s
        if begins > self._began + most_s or (self._deadline is not None and begins >= self._deadline):
            raise error
        if self._retry.on_wait is not None:
            self._retry.on_wait(error, wait_s)
        return wait_s

    def _next_wait_s(self, error: ApiError) -> float:
        if error.retry_after_s is not None:
            return max(error.retry_after_s, _LEAST_S) * (1 + _SPREAD * self._draw())
        doubled = self._retry.first_wait_s * 2.0 ** min(self._failed - 1, 30)
        return min(doubled, self._retry.most_wait_s) * (1 - self._draw() / 2)


def may_succeed_later(error: ApiError) -> bool:
    """Not so RESOURCE_EXHAUSTED for an answer that is too large: it says no time to come back."""
    if error.code == "RESOURCE_EXHAUSTED":
        return error.retry_after_s is not None
    return error.code == "UNAVAILABLE"
