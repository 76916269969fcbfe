"""Applied once to every RPC of this project: errors become statuses, and running calls are counted."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NoReturn, TypeVar

import grpc

from pyruntime.errors import ClientStalled, DeadlinePassed, NotReady, Overloaded, PyruntimeError
from pyruntime.registry import DRAINING_RETRY_S
from pyruntime.service.incoming import checked, reader
from pyruntime.service.stalls import Stalls
from pyruntime.service.status import DETAILS_KEY, code_of, request_info, retry_pushback, to_status
from pyruntime.service.validate import check_message_size
from pyruntime.telemetry.call_record import current_call

T = TypeVar("T")

OWN_METHODS = "/pyruntime."
# Told to clients that come while as many calls are open as there may be.
CROWDED_RETRY_S = 1.0


async def abort(context: grpc.aio.ServicerContext, error: BaseException) -> NoReturn:
    """End the call with the status of ``error``, which names the call; what trailers it has it keeps."""
    status = to_status(error)
    if (call := current_call()) is not None:
        call.note_error(error)
        status.details.append(request_info(call.request_id))
    own = ((DETAILS_KEY, status.SerializeToString()), *retry_pushback(error))
    trailers = *(context.trailing_metadata() or ()), *own
    await context.abort(code_of(error), status.message, trailers)
    raise AssertionError("abort does not return")


def refusal(error: PyruntimeError) -> grpc.RpcMethodHandler:
    """A handler that ends its call with ``error``.

    Of the form that reads nothing on its own: the message of a refused call, however large, is not waited for.
    """

    async def refuse(requests: Any, context: grpc.aio.ServicerContext) -> None:
        await abort(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every handler. Those of ``pyruntime.*`` services are counted, health and reflection are not.

    ``num_running`` counts the calls inside a handler, which is what a drain waits for. ``max_open_calls``: calls, from
    their first byte to their last, past which one is refused. ``stall_s``: as in ``Stalls``.
    """

    def __init__(self, max_message_bytes: int, *, max_open_calls: int = 2**20, stall_s: float = 0.0) -> None:
        self._max_message_bytes = max_message_bytes
        self._max_open_calls = max_open_calls
        self._num_open = 0
        self._stalls = Stalls(stall_s)
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
        if method.startswith(OWN_METHODS):
            if self._num_open >= self._max_open_calls:
                limit = f"{self._max_open_calls} calls are open, the most that this server takes"
                return refusal(Overloaded(limit, CROWDED_RETRY_S))
            self._open()
        if method not in self._wrapped:
            handler = await continuation(handler_call_details)
            if handler is None:  # no such method: grpc answers UNIMPLEMENTED itself
                return handler
            self._wrapped[method] = self._wrap(handler, counts=method.startswith(OWN_METHODS))
        return self._wrapped[method]

    def _open(self) -> None:
        """A call begins; its task ends with the last byte of its answer."""
        task = asyncio.current_task()
        assert task is not None
        self._num_open += 1
        task.add_done_callback(self._close)

    def _close(self, _: asyncio.Task[Any]) -> None:
        self._num_open -= 1

    def _wrap(self, handler: Any, counts: bool) -> grpc.RpcMethodHandler:
        codec = {
            "request_deserializer": reader(handler.request_deserializer, self._max_message_bytes),
            "response_serializer": handler.response_serializer,
        }
        if handler.stream_stream:
            return grpc.stream_stream_rpc_method_handler(self._streaming(handler.stream_stream, counts), **codec)
        if handler.unary_stream:
            return grpc.unary_stream_rpc_method_handler(self._streaming(handler.unary_stream, counts), **codec)
        if handler.stream_unary:
            return grpc.stream_unary_rpc_method_handler(self._unary(handler.stream_unary, counts), **codec)
        return grpc.unary_unary_rpc_method_handler(self._unary(handler.unary_unary, counts), **codec)

    def _unary(self, method: Callable[..., Awaitable[Any]], counts: bool = True) -> Callable[..., Awaitable[Any]]:
        async def call(request: Any, context: grpc.aio.ServicerContext) -> Any:
            return await self._guard(context, self._answer(method, request, context), counts)

        return call

    def _streaming(self, method: Callable[..., Any], counts: bool = True) -> Callable[..., Awaitable[None]]:
        # A coroutine that writes, rather than an async generator: when the call is cancelled between two messages, a
        # coroutine is cancelled at once, while a generator would linger until it is collected.
        async def call(request: Any, context: grpc.aio.ServicerContext) -> None:
            await self._guard(context, self._write(method, request, context), counts)

        return call

    async def _answer(self, method: Callable[..., Awaitable[Any]], request: Any, context: Any) -> Any:
        response = await method(checked(request), context)
        check_message_size(response, self._max_message_bytes)
        return response

    async def _write(self, method: Callable[..., Any], request: Any, context: Any) -> None:
        task = asyncio.current_task()
        assert task is not None
        answer = method(checked(request), context)
        if inspect.isawaitable(answer):  # it writes itself, as health's Watch does
            await answer
            return
        async with contextlib.aclosing(answer) as messages:
            async for message in messages:
                self._stalls.begin(task, check_message_size(message, self._max_message_bytes))
                try:
                    await context.write(message)
                finally:
                    self._stalls.end(task)

    async def _guard(self, context: grpc.aio.ServicerContext, work: Coroutine[Any, Any, T], counts: bool) -> T:
        """``work`` as one running call, its errors as the call's status."""
        task = asyncio.current_task()
        assert task is not None
        if counts:
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
            try:
                await abort(context, self._why_cancelled(task))
            except grpc.aio.InternalError:  # a message that the client does not read stands before any status
                raise asyncio.CancelledError from None
        except Exception as error:
            await abort(context, error)
        finally:
            self._leave(task)

    def _why_cancelled(self, task: asyncio.Task[Any]) -> PyruntimeError:
        """What the client is told. Raises the cancellation again when it was the client's own, or its deadline's."""
        if self._stalls.take(task):
            # What the call held is free by now, and it may wait for long until its client reads the status.
            self._leave(task)
            return ClientStalled("the client has not read the stream for too long (client_stall_s)")
        if task in self._evicted:
            return NotReady("the server is shutting down", DRAINING_RETRY_S)
        raise asyncio.CancelledError

    def _enter(self, task: asyncio.Task[Any]) -> None:
        self._running.add(task)
        self._idle.clear()

    def _leave(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        self._evicted.discard(task)
        if not self._running:
            self._idle.set()
