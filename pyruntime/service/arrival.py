"""Reads the request of each unary call, outermost of all.

grpc would do that itself, but leaves a call without any answer when its client ends it before its message is whole, and
waits for ever for one that neither ends it nor goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from grpc.aio import EOF  # type: ignore[attr-defined]

from pyruntime.errors import ClientStalled, MalformedMessage
from pyruntime.service.interceptor import abort
from pyruntime.service.stalls import Stalls

# A request may be as large as a message is, and lines are slow: it has so many times as long as a message of a stream.
PATIENCE = 5


class ArrivalInterceptor(grpc.aio.ServerInterceptor):
    """``stall_s``: as in ``Stalls``; a request has five times as long to arrive. Streams of them may take any time."""

    def __init__(self, stall_s: float) -> None:
        self._stalls = Stalls(stall_s * PATIENCE)
        # By the handler that was wrapped: those behind this one may answer with another one at any call.
        self._wrapped: dict[str, tuple[Any, grpc.RpcMethodHandler]] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler: Any = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler
        method = handler_call_details.method
        inner, outer = self._wrapped.get(method, (None, None))
        if inner is not handler or outer is None:
            outer = self._wrap(handler)
            self._wrapped[method] = handler, outer
        return outer

    def _wrap(self, handler: Any) -> grpc.RpcMethodHandler:
        """The handler as one that reads a stream, of which it reads one message."""
        codec = {
            "request_deserializer": handler.request_deserializer,
            "response_serializer": handler.response_serializer,
        }
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(self._reading(handler.unary_stream), **codec)
        return grpc.stream_unary_rpc_method_handler(self._reading(handler.unary_unary), **codec)

    def _reading(self, method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def call(_: Any, context: grpc.aio.ServicerContext) -> Any:
            return await method(await self._read(context), context)

        return call

    async def _read(self, context: Any) -> Any:
        task = asyncio.current_task()
        assert task is not None
        ending: list[asyncio.Task[Any]] = []

        def give_up() -> None:
            # Beside the read, which must not be cancelled: grpc writes what it reads to where the reader waits.
            error = ClientStalled("the request has not arrived for too long (client_stall_s)")
            ending.append(asyncio.ensure_future(_end(context, error)))

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
