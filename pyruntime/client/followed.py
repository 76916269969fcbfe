"""What grpc.aio's channels and calls lack: an end to every open call, and the server's own status."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import grpc

# Details of the status that grpc makes up when it cannot write.
_MADE_UP = "Internal error from Core"
# Seconds in which the server's own status should have come as well.
_OWN_STATUS_S = 1.0


class FollowedChannel:
    """As much of a ``grpc.aio.Channel`` as stubs use. Closing it ends every call that is still open.

    grpc's own ``close`` ends those alone that a task is waiting for at that moment.
    """

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self._calls: weakref.WeakSet[Any] = weakref.WeakSet()

    def unary_unary(self, *arguments: Any, **options: Any) -> Callable[..., Any]:
        return self._followed(self._channel.unary_unary(*arguments, **options))

    def unary_stream(self, *arguments: Any, **options: Any) -> Callable[..., Any]:
        return self._followed(self._channel.unary_stream(*arguments, **options))

    def stream_unary(self, *arguments: Any, **options: Any) -> Callable[..., Any]:
        return self._followed(self._channel.stream_unary(*arguments, **options))

    def stream_stream(self, *arguments: Any, **options: Any) -> Callable[..., Any]:
        return self._followed(self._channel.stream_stream(*arguments, **options))

    async def close(self) -> None:
        for call in list(self._calls):
            call.cancel()
        await self._channel.close(None)

    def _followed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def begin(*arguments: Any, **options: Any) -> Any:
            call = method(*arguments, **options)
            self._calls.add(call)
            return call

        return begin


@contextlib.asynccontextmanager
async def own_status(call: Any) -> AsyncIterator[None]:
    """Inside, a stream that the server ends raises the server's status.

    Where a request is being written at that moment, grpc may set a status of its own instead, before or after the
    server's (github.com/grpc/grpc/issues/36066). Its callbacks see each of them.
    """
    told: asyncio.Future[grpc.aio.AioRpcError] = asyncio.get_running_loop().create_future()

    def note(ended: Any) -> None:
        code, details, trailing = _now(ended.code()), _now(ended.details()), _now(ended.trailing_metadata())
        if details != _MADE_UP and code is not grpc.StatusCode.OK and not told.done():
            told.set_result(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details, None))

    call.add_done_callback(note)
    try:
        yield
    except grpc.aio.AioRpcError as error:
        if error.details() != _MADE_UP:
            raise
        await asyncio.wait({told}, timeout=_OWN_STATUS_S)
        raise (told.result() if told.done() else error) from None


def _now(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that has nothing to wait for, as those about a call that has ended."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("the call has not ended")
