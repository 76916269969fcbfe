"""Applied once to every RPC of this project: errors become statuses, and running calls are counted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any, NoReturn, TypeVar

import grpc

from pyruntime.errors import DeadlinePassed, NotReady
from pyruntime.registry import DRAINING_RETRY_S
from pyruntime.service.status import DETAILS_KEY, code_of, to_status
from pyruntime.service.validate import check_message_size

T = TypeVar("T")

OWN_METHODS = "/pyruntime."


async def abort(context: grpc.aio.ServicerContext, error: BaseException) -> NoReturn:
    """End the call with the status of ``error``."""
    status = to_status(error)
    await context.abort(code_of(error), status.message, ((DETAILS_KEY, status.SerializeToString()),))
    raise AssertionError("abort does not return")


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Wraps the handlers of ``pyruntime.*`` services; health and reflection pass through.

    ``num_running`` counts the calls inside a handler, which is what a drain waits for.
    """

    def __init__(self, max_message_bytes: int) -> None:
        self._max_message_bytes = max_message_bytes
        self._running: set[asyncio.Task[Any]] = set()
        self._evicted: set[asyncio.Task[Any]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._wrapped: dict[str, grpc.RpcMethodHandler] = {}

    @property
    def num_running(self) -> int:
        return len(self._running)

    def evict(self) -> None:
        """End the calls that run now: their clients are told to come back, as those of a server that drains are."""
        self._evicted |= self._running
        for task in self._evicted:
            task.cancel()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no call runs; False when ``timeout_s`` passed first."""
        if self.num_running == 0:
            return True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        method = handler_call_details.method
        if not method.startswith(OWN_METHODS):
            return await continuation(handler_call_details)
        if method not in self._wrapped:
            handler = await continuation(handler_call_details)
            if handler is None:  # no such method: grpc answers UNIMPLEMENTED itself
                return handler
            self._wrapped[method] = self._wrap(handler)
        return self._wrapped[method]

    def _wrap(self, handler: Any) -> grpc.RpcMethodHandler:
        codec = {
            "request_deserializer": handler.request_deserializer,
            "response_serializer": handler.response_serializer,
        }
        if handler.stream_stream:
            return grpc.stream_stream_rpc_method_handler(self._streaming(handler.stream_stream), **codec)
        if handler.unary_stream:
            return grpc.unary_stream_rpc_method_handler(self._streaming(handler.unary_stream), **codec)
        if handler.stream_unary:
            return grpc.stream_unary_rpc_method_handler(self._unary(handler.stream_unary), **codec)
        return grpc.unary_unary_rpc_method_handler(self._unary(handler.unary_unary), **codec)

    def _unary(self, method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def call(request: Any, context: grpc.aio.ServicerContext) -> Any:
            return await self._guard(context, self._answer(method, request, context))

        return call

    def _streaming(self, method: Callable[..., AsyncGenerator[Any, None]]) -> Callable[..., Awaitable[None]]:
        # A coroutine that writes, rather than an async generator: when the call is cancelled between two messages, a
        # coroutine is cancelled at once, while a generator would linger until it is collected.
        async def call(request: Any, context: grpc.aio.ServicerContext) -> None:
            await self._guard(context, self._write(method, request, context))

        return call

    async def _answer(self, method: Callable[..., Awaitable[Any]], request: Any, context: Any) -> Any:
        response = await method(request, context)
        check_message_size(response, self._max_message_bytes)
        return response

    async def _write(self, method: Callable[..., AsyncGenerator[Any, None]], request: Any, context: Any) -> None:
        async with contextlib.aclosing(method(request, context)) as messages:
            async for message in messages:
                check_message_size(message, self._max_message_bytes)
                await context.write(message)

    async def _guard(self, context: grpc.aio.ServicerContext, work: Coroutine[Any, Any, T]) -> T:
        """``work`` as one running call, its errors as the call's status."""
        task = asyncio.current_task()
        assert task is not None
        self._enter(task)
        try:
            remaining_s = context.time_remaining()
            if remaining_s is not None and remaining_s <= 0:  # the loop was busy: it is too late to begin
                work.close()
                raise DeadlinePassed("the deadline passed before the request could be looked at")
            return await work
        except grpc.aio.AbortError:
            raise
        except asyncio.CancelledError:
            if task not in self._evicted:  # the client went away or its deadline passed
                raise
            try:
                await abort(context, NotReady("the server is shutting down", DRAINING_RETRY_S))
            except grpc.aio.InternalError:  # a message that the client does not read stands before any status
                raise asyncio.CancelledError from None
        except Exception as error:
            await abort(context, error)
        finally:
            self._leave(task)

    def _enter(self, task: asyncio.Task[Any]) -> None:
        self._running.add(task)
        self._idle.clear()

    def _leave(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        self._evicted.discard(task)
        if not self._running:
            self._idle.set()
