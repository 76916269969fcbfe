"""Ends calls whose clients have stopped reading or sending, so that they keep nothing for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

# How often, as a part of the time allowed, somebody looks.
LOOKS = 4


class Stalls:
    """Which calls wait for their client to take or to send a message, and until when. For one event loop.

    ``limit_s``: seconds that a client has for a message, and once more for each MiB of it; 0 for no limit. One timer
    looks after all calls.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._until: dict[asyncio.Task[Any], tuple[float, Callable[[], None] | None]] = {}
        self._ended: set[asyncio.Task[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, task: asyncio.Task[Any], num_bytes: int, on_stall: Callable[[], None] | None = None) -> None:
        """The call of ``task`` waits from now on, with a message of ``num_bytes``.

        In the end ``on_stall`` is called, or the task cancelled, which ``take`` then tells.
        """
        if not self._limit_s:
            return
        loop = task.get_loop()
        self._until[task] = loop.time() + self._limit_s * (1 + num_bytes // 2**20), on_stall
        if self._timer is None:
            self._timer = loop.call_later(self._limit_s / LOOKS, self._look, loop)

    def end(self, task: asyncio.Task[Any]) -> None:
        """It waits no more."""
        self._until.pop(task, None)

    def take(self, task: asyncio.Task[Any]) -> bool:
        """Whether the call was cancelled from here; told once."""
        if task not in self._ended:
            return False
        self._ended.discard(task)
        return True

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        now = loop.time()
        for task, (until, on_stall) in list(self._until.items()):
            if now < until:
                continue
            del self._until[task]
            if on_stall is not None:
                on_stall()
            else:
                self._ended.add(task)
                task.cancel()
        if self._until:
            self._timer = loop.call_later(self._limit_s / LOOKS, self._look, loop)
