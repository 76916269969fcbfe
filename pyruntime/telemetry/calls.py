"""What is counted of the calls. Knows nothing of gRPC: codes and methods come as names.

Written on the event loop that runs the calls, and read from anywhere by copies.
"""

from __future__ import annotations

import time
from collections import Counter, deque
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
    """A call that failed; ``at`` in seconds since 1970. Nothing of the request is kept."""

    at: float
    method: str
    code: str
    reason: str


class CallStats:
    """Counts since the start: by method and code, by reason; times of whole calls by method; the last failures."""

    def __init__(self) -> None:
        self.ended: Counter[tuple[str, str]] = Counter()
        self.running: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.seconds: dict[str, Histogram] = {}
        self.failures: deque[Failure] = deque(maxlen=MOST_FAILURES)

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
            self.failures.append(Failure(time.time(), method, code, reason))
