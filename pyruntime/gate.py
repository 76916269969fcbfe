"""A first-come-first-served lock: engines that share a device take turns, step by step."""

from __future__ import annotations

import functools
import threading
from collections import deque


class FairLock:
    """As ``threading.Lock``, but a thread that releases and asks again goes behind those who wait.

    A plain lock may be taken again by the thread that just let it go, so one busy model would
    shut the others of the same device out.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()
        self._held = False

    def __enter__(self) -> FairLock:
        with self._mutex:
            if not self._held:
                self._held = True
                return self
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append(turn)
        turn.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        with self._mutex:
            if self._waiting:
                self._waiting.popleft().release()  # the lock passes on, it is never free in between
            else:
                self._held = False


@functools.cache
def device_gate(device: str) -> FairLock:
    """The lock that all engines of one device share."""
    return FairLock()
