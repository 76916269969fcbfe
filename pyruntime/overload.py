"""How fast queued work is done, and whether a queue is a burst that passes or one that stands."""

from __future__ import annotations

import math

# The rates look back this long; what is older fades out.
WINDOW_S = 10.0
# Seconds of work before a rate is believed.
EVIDENCE_S = 1.0
# Calls that meet a queue too long for them belong together while no more than CALM_S lie between them, and those of the
# first BURST_S are a burst.
BURST_S, CALM_S = 1.0, 5.0


class Rate:
    """An amount a second of work: the mean over the last ``WINDOW_S`` seconds, exponentially weighted."""

    def __init__(self) -> None:
        self._amount = 0.0
        self._seconds = 0.0

    def note(self, amount: float, seconds: float) -> None:
        """``amount`` was done in ``seconds`` more."""
        self.fade(seconds)
        self._amount += amount
        self._seconds += seconds

    def fade(self, seconds: float) -> None:
        """``seconds`` of work that tell nothing: what is known stays, and is believed for so much less longer."""
        fade = math.exp(-seconds / WINDOW_S)
        self._amount *= fade
        self._seconds *= fade

    @property
    def per_s(self) -> float | None:
        """None until there is enough evidence, and when nothing was done in all that time."""
        return self._amount / self._seconds if self._seconds >= EVIDENCE_S and self._amount > 0 else None


class Standing:
    """Tells a queue that stands from a burst, by the calls that meet more of it than they should."""

    def __init__(self) -> None:
        self._began_s = self._last_s = -math.inf

    def met(self, now_s: float) -> bool:
        """Such a call has come; whether that has gone on for longer than a burst."""
        if now_s - self._last_s > CALM_S:
            self._began_s = now_s
        self._last_s = now_s
        return now_s - self._began_s >= BURST_S
