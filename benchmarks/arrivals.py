"""When requests arrive, which rates are tried, what the answers came to: the parts of the open loop that compute."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

PERCENTS = (50, 95, 99)
OVERLOAD = 1.5


def poisson(rate: float, seconds: float, source: random.Random) -> list[float]:
    """Seconds after the start at which requests arrive: gaps drawn from the exponential law of mean ``1 / rate``."""
    times, at = [], source.expovariate(rate)
    while at < seconds:
        times.append(at)
        at += source.expovariate(rate)
    return times


def percentile(values: Sequence[float], percent: float) -> float:
    """The least value that so many percent of all do not exceed (nearest rank); NaN of nothing."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def in_ms(seconds: Sequence[float]) -> dict[str, float]:
    """``p50_ms`` and the others of ``PERCENTS``; nothing of nothing."""
    if not seconds:
        return {}
    return {f"p{percent}_ms": percentile(seconds, percent) * 1e3 for percent in PERCENTS}


class Sweep:
    """Which rate to try next, until the highest that the server sustains is known to within ``resolution``.

    From ``start`` the rate doubles until one is not sustained (or halves until one is), then the gap between the two
    is divided at its geometric mean. Last comes ``OVERLOAD`` times what is too much, where nothing as high was tried:
    what a server still does then. What is sustained above a rate that was not is taken for luck.
    """

    def __init__(self, start: float, resolution: float = 1.2) -> None:
        self._start, self._resolution = start, resolution
        self._sustained: dict[float, bool] = {}

    def note(self, rate: float, sustained: bool) -> None:
        self._sustained[rate] = sustained

    @property
    def too_much(self) -> float | None:
        """The lowest rate that was not sustained."""
        return min((rate for rate, held in self._sustained.items() if not held), default=None)

    @property
    def saturation(self) -> float | None:
        """The highest rate that was sustained, below any that was not."""
        bound = math.inf if self.too_much is None else self.too_much
        return max((rate for rate, held in self._sustained.items() if held and rate < bound), default=None)

    def next_rate(self) -> float | None:
        low, high = self.saturation, self.too_much
        if low is None:
            return self._start if high is None else high / 2
        if high is None:
            return low * 2
        if high / low > self._resolution:
            return math.sqrt(low * high)
        return high * OVERLOAD if max(self._sustained) < high * OVERLOAD else None


class Seen:
    """One request: when it was due, and what became of it. Times are seconds after the start of its point."""

    __slots__ = ("at", "body", "code", "computed", "done", "end", "first", "gaps", "sent", "size", "task")

    def __init__(self, task: str, at: float, body: bytes, size: int) -> None:
        self.task, self.at, self.body, self.size = task, at, body, size
        self.sent = self.first = self.end = math.nan
        #: The name of its gRPC status; of a wrong answer ``WRONG``.
        self.code = ""
        #: Texts, documents, items or tokens that were answered; prompt tokens computed for them.
        self.done = self.computed = 0
        #: Seconds between one message of a stream and the next.
        self.gaps: list[float] = []

    @property
    def wait_s(self) -> float:
        """From when it was due, not from when it was sent, to its first answer: a late client hides nothing."""
        return self.first - self.at

    @property
    def whole_s(self) -> float:
        return self.end - self.at


def figures(
    calls: Sequence[Seen], task: str, window: tuple[float, float], objective_s: float, pause_s: float
) -> dict[str, Any]:
    """What the calls of a task came to. Latency is of those due within ``window``, rates are over it.

    In time is a call whose first answer came within ``objective_s`` after it was due and whose messages then followed
    each other by ``pause_s`` on average at most; ``in_time``: their share of all that were due. ``offered``,
    ``achieved`` and ``goodput`` are requests a second: due, answered, and in time. ``done_per_s`` counts texts,
    documents, items or tokens of answers that ended within the window, ``computed_per_s`` prompt tokens.
    """
    own = [call for call in calls if call.task == task]
    begin, end = window
    seconds = end - begin
    due = [call for call in own if begin <= call.at < end]
    ended = [call for call in own if call.code == "OK" and begin <= call.end < end]
    answered = [call for call in due if call.code == "OK"]
    timely = [call for call in answered if is_timely(call, objective_s, pause_s)]
    codes = sorted({call.code for call in due} - {"OK"})
    found: dict[str, Any] = {
        "calls": len(due),
        "timely": len(timely),
        "offered": len(due) / seconds,
        "achieved": len(ended) / seconds,
        "goodput": len(timely) / seconds,
        "in_time": len(timely) / len(due) if due else 1.0,
        "done_per_s": sum(call.done for call in ended) / seconds,
        "computed_per_s": sum(call.computed for call in ended) / seconds,
        "in_flight": sum(call.whole_s for call in answered) / seconds,
        "refused": {code: sum(call.code == code for call in due) for code in codes},
        "whole": in_ms([call.whole_s for call in answered]),
    }
    if gaps := [gap for call in answered for gap in call.gaps]:
        found["first"] = in_ms([call.wait_s for call in answered])
        found["between"] = in_ms(gaps)
    return found


def is_timely(call: Seen, objective_s: float, pause_s: float) -> bool:
    if call.code != "OK" or call.wait_s > objective_s:
        return False
    return not call.gaps or sum(call.gaps) / len(call.gaps) <= pause_s


def lag(calls: Sequence[Seen]) -> dict[str, Any]:
    """How late the client itself was in sending; a point is ``late`` where that could be seen in its latencies."""
    lags = [call.sent - call.at for call in calls]
    latency = percentile([call.whole_s for call in calls if call.code == "OK"], 50)
    return {**in_ms(lags), "late": percentile(lags, 95) > max(0.005, 0.1 * latency)}
