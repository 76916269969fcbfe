"""What is counted of the calls. Knows nothing of gRPC: codes and methods come as names.

Written on the event loop that runs the calls, and read from anywhere by copies: ``dict(each)`` is made in one go,
while going through one that grows is an error.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import NamedTuple

from pyruntime.stats import WAIT_BOUNDS, Histogram

# Codes of calls that are no failures: the second ones their clients gave up.
OK, CANCELLED = "OK", "CANCELLED"
# Stands for every method that this server does not have: their names are the clients' to choose.
UNKNOWN = "_OTHER"
# Reasons are this project's own constants; the bound is for the day when one is not.
MOST_REASONS = 64
OTHER_REASON = "OTHER"
MOST_FAILURES = 50


class Failure(NamedTuple):
    """Calls that failed alike: how many, the last one ``at`` so many seconds since 1970. Nothing of a request is kept.

    Kept by kind, so that a flood of one kind does not hide the others.
    """

    at: float
    method: str
    code: str
    reason: str
    times: int


class CallStats:
    """Counts since the start: by method and code, by reason; times of whole calls by method; the last failures.

    running    calls that have arrived and not ended, by method
    failures   the last kinds of failures, the latest last
    """

    def __init__(self) -> None:
        self.ended: Counter[tuple[str, str]] = Counter()
        self.running: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.seconds: dict[str, Histogram] = {}
        self.failures: dict[tuple[str, str, str], Failure] = {}

    def begin(self, method: str) -> None:
        self.running[method] += 1

    def end(self, method: str, seconds: float, code: str, reason: str = "") -> None:
        """A call that began has ended. ``reason``: the one of its error, empty when it has none of this server's."""
        self.running[method] -= 1
        if method not in self.seconds:
            self.seconds[method] = Histogram(WAIT_BOUNDS)
        self.seconds[method].observe(seconds)
        self.ended[method, code] += 1
        if reason:
            known = reason in self.reasons or len(self.reasons) < MOST_REASONS
            self.reasons[reason if known else OTHER_REASON] += 1
        if code not in (OK, CANCELLED):
            self._note_failure((method, code, reason))

    def _note_failure(self, kind: tuple[str, str, str]) -> None:
        before = self.failures.pop(kind, None)
        if len(self.failures) >= MOST_FAILURES:
            del self.failures[next(iter(self.failures))]
        self.failures[kind] = Failure(time.time(), *kind, before.times + 1 if before else 1)
