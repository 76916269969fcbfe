"""How many log lines there may be of events that are alike, so that a flood of them costs neither time nor disk."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable

# Of one kind: so many at once, and then so many a second.
BURST, PER_S = 100.0, 10.0


class LineQuota:
    """A bucket of lines for each kind of event, full at first. Kinds are kept for ever: let there be few of them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left: dict[Hashable, tuple[float, float, int]] = {}

    def take(self, kind: Hashable) -> int | None:
        """A line: how many of its kind were left out since the last one; None when this one is to be left out too."""
        now = self._clock()
        lines, at, left_out = self._left.get(kind, (BURST, now, 0))
        lines = min(BURST, lines + (now - at) * PER_S)
        if lines < 1:
            self._left[kind] = lines, now, left_out + 1
            return None
        self._left[kind] = lines - 1, now, 0
        return left_out
