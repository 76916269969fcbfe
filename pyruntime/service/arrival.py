"""Reads the request of each unary call.

grpc would do that itself, but leaves a call without any answer when its client ends it before its message is whole, and
waits for ever for one that neither ends it nor goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from typing import Any

import grpc
from grpc.aio import EOF  # type: ignore[attr-defined]

from pyruntime.errors import ClientStalled, MalformedMessage
from pyruntime.service.interceptor import abort
from pyruntime.service.stalls import Stalls

# A request may be as large as a message is, and lines are slow: it has so many times as long as a message of a stream.
PATIENCE = 5


class Arrivals:
    """``stall_s``: as in ``Stalls``; a request has five times as long to arrive. For one event loop."""

    def __init__(self, stall_s: float) -> None:
        self._stalls = Stalls(stall_s * PATIENCE)

    async def read(self, context: Any) -> Any:
        """The one message of a call whose handler reads a stream; ends the call when there is none."""
        task = asyncio.current_task()
        assert task is not None
        ending: list[asyncio.Task[Any]] = []
        own = contextvars.copy_context()  # for who gives up is called in that of whichever call came first

        def give_up() -> None:
            # Beside the read, which must not be cancelled: grpc writes what it reads to where the reader waits.
            error = ClientStalled("the request has not arrived for too long (client_stall_s)")
            ending.append(asyncio.create_task(_end(context, error), context=own))

        self._stalls.begin(task, 0, give_up)
        try:
            message = await context.read()
        finally:
            self._stalls.end(task)
        if ending:
            await ending[0]
            raise asyncio.CancelledError
        if message is EOF:
            await abort(context, MalformedMessage("the call has no request, or not all of one"))
        return message


async def _end(context: grpc.aio.ServicerContext, error: ClientStalled) -> None:
    with contextlib.suppress(grpc.aio.AbortError, grpc.aio.InternalError):  # the latter: the client has gone
        await abort(context, error)
