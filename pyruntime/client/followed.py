"""What grpc.aio's channels and calls lack: an end to every open call, and the server's own status."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import grpc

# Details of the status that grpc makes up when it cannot write.
_MADE_UP = "Internal error from Core"
# Seconds in which the server's own status should have come as well.
_OWN_STATUS_S = 1.0


class FollowedChannel:
    """As much of a ``grpc.aio.Channel`` as stubs use. Closing it ends every call that is still open.

    grpc's own ``close`` ends those alone that a task is waiting for at that moment.
    ``entries``: returns further metadata for each call.
    """

    def __init__(
        self, channel: grpc.aio.Channel, entries: Callable[[], Iterable[tuple[str, str]]] | None = None
    ) -> None:
        self._channel = channel
        self._entries = entries
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
            if self._entries is not None:
                options["metadata"] = [*(options.get("metadata") or ()), *self._entries()]
            call = method(*arguments, **options)
            self._calls.add(call)
            return call

        return begin


class OwnStatus:
    """The status that the server itself has ended a stream with.

    Where a request is being written at that moment, grpc may set a status of its own instead, before or after the
    server's (github.com/grpc/grpc/issues/36066). Its callbacks see each of them.
    """

    def __init__(self, call: Any) -> None:
        self._told: asyncio.Future[grpc.aio.AioRpcError] = asyncio.get_running_loop().create_future()
        call.add_done_callback(self._note)

    async def instead_of(self, error: grpc.aio.AioRpcError) -> grpc.aio.AioRpcError:
        """``error``, or what it hides."""
        if error.details() != _MADE_UP:
            return error
        await asyncio.wait({self._told}, timeout=_OWN_STATUS_S)
        return self._told.result() if self._told.done() else error

    def _note(self, ended: Any) -> None:
        code, details, trailing = _now(ended.code()), _now(ended.details()), _now(ended.trailing_metadata())
        if details != _MADE_UP and code is not grpc.StatusCode.OK and not self._told.done():
            self._told.set_result(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details, None))


def _now(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that has nothing to wait for, as those about a call that has ended."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("the call has not ended")
