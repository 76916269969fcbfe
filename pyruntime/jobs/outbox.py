"""Calls for event loops, collected on the step thread and sent once a step."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any


class Outbox:
    """Calls for event loops, collected on the step thread and sent together."""

    def __init__(self) -> None:
        self._calls: dict[asyncio.AbstractEventLoop, list[tuple[Callable[..., None], Any]]] = {}

    def add(self, loop: asyncio.AbstractEventLoop, function: Callable[[Any], None], argument: Any) -> None:
        self._calls.setdefault(loop, []).append((function, argument))

    def send(self) -> None:
        """Wake each loop once; a closed one has nobody left to tell. What is for the loop of this thread is called."""
        collected, self._calls = self._calls, {}
        here = asyncio._get_running_loop() if collected else None
        for loop, calls in collected.items():
            if loop is here:
                _run(calls)
                continue
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_run, calls)


def _run(calls: list[tuple[Callable[..., None], Any]]) -> None:
    for function, argument in calls:
        function(argument)
