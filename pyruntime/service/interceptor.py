"""Applied once to every RPC of this project: errors become statuses, and running calls are counted."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NoReturn, TypeVar

import grpc

from pyruntime.errors import ClientStalled, DeadlinePassed, Overloaded, PyruntimeError
from pyruntime.registry import shutting_down
from pyruntime.service.incoming import checked, reader
from pyruntime.service.outlet import Outlet
from pyruntime.service.stalls import Stalls
from pyruntime.service.status import DETAILS_KEY, code_of, request_info, retry_pushback, to_status
from pyruntime.service.validate import Pack, packer
from pyruntime.telemetry.call_record import current_call

T = TypeVar("T")

OWN_METHODS = "/pyruntime."
# Told to clients that come while as many calls are open as there may be.
CROWDED_RETRY_S = 1.0
# What makes a handler, by whether the requests and the responses are a stream.
HANDLERS: dict[tuple[bool, bool], Callable[..., grpc.RpcMethodHandler]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


async def abort(context: grpc.aio.ServicerContext, error: BaseException) -> NoReturn:
    """End the call with the status of ``error``, which names the call; what trailers it has it keeps.

    Raises ``grpc.aio.AbortError``, or ``grpc.aio.InternalError`` when the status cannot be sent: the client has gone,
    or does not read a message that stands before it.
    """
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
    """Wraps every handler. Of ``pyruntime.*`` services the running calls are counted, of health and reflection not.

    ``num_running`` counts the calls inside a handler, which is what a drain waits for. ``max_open_calls``: calls, from
    their first byte to their last, past which one is refused; of each method of health and reflection as many more, so
    that probes are answered however busy the server is. ``stall_s``: as in ``Stalls``.
    """

    def __init__(self, max_message_bytes: int, *, max_open_calls: int = 2**20, stall_s: float = 0.0) -> None:
        self._max_message_bytes = max_message_bytes
        self._max_open_calls = max_open_calls
        self._num_open = Counter[str]()
        self._stalls = Stalls(stall_s)
        self._running: set[asyncio.Task[Any]] = set()
        self._evicted: set[asyncio.Task[Any]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._last_call_s = -math.inf
        self._wrapped: dict[str, grpc.RpcMethodHandler] = {}

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def is_alone(self) -> bool:
        """At most one call of this project's services is open, from its first byte on."""
        return self._num_open[OWN_METHODS] <= 1

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

    async def wait_quiet(self, quiet_s: float, timeout_s: float) -> None:
        """Wait until no call has come for ``quiet_s``, but not longer than ``timeout_s``."""
        end_s = time.monotonic() + timeout_s
        left_s = timeout_s
        while left_s > 0:
            left_s = min(self._last_call_s + quiet_s, end_s) - time.monotonic()
            await asyncio.sleep(max(0.0, left_s))

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        method = handler_call_details.method
        if method not in self._wrapped:
            handler = await continuation(handler_call_details)
            if handler is None:  # no such method
                return handler
            self._wrapped[method] = self._wrap(handler, counts=method.startswith(OWN_METHODS))
        crowd = OWN_METHODS if method.startswith(OWN_METHODS) else method
        if self._num_open[crowd] >= self._max_open_calls:
            limit = f"{self._max_open_calls} calls are open, the most that this server takes"
            return refusal(Overloaded(limit, CROWDED_RETRY_S))
        self._open(crowd)
        return self._wrapped[method]

    def _open(self, crowd: str) -> None:
        """A call begins; its task ends with the last byte of its answer."""
        task = asyncio.current_task()
        assert task is not None
        self._num_open[crowd] += 1
        task.add_done_callback(functools.partial(self._close, crowd))

    def _close(self, crowd: str, _: asyncio.Task[Any]) -> None:
        self._num_open[crowd] -= 1

    def _wrap(self, handler: Any, counts: bool) -> grpc.RpcMethodHandler:
        """A handler whose answers are bytes already: how large a message is, only making them tells."""
        method = handler.stream_stream or handler.unary_stream or handler.stream_unary or handler.unary_unary
        pack = packer(handler.response_serializer, self._max_message_bytes)
        codec = {
            "request_deserializer": reader(handler.request_deserializer, self._max_message_bytes),
            "response_serializer": None,
        }
        kind = self._streaming if handler.response_streaming else self._unary
        make = HANDLERS[handler.request_streaming, handler.response_streaming]
        return make(kind(method, pack, counts), **codec)

    def _unary(
        self, method: Callable[..., Awaitable[Any]], pack: Pack, counts: bool
    ) -> Callable[..., Awaitable[bytes]]:
        async def call(request: Any, context: grpc.aio.ServicerContext) -> bytes:
            return await self._guard(context, self._answer(method, pack, request, context), counts)

        return call

    def _streaming(self, method: Callable[..., Any], pack: Pack, counts: bool) -> Callable[..., Awaitable[None]]:
        # A coroutine that writes, rather than an async generator: when the call is cancelled between two messages, a
        # coroutine is cancelled at once, while a generator would linger until it is collected.
        async def call(request: Any, context: grpc.aio.ServicerContext) -> None:
            await self._guard(context, self._write(method, pack, request, context), counts)

        return call

    async def _answer(self, method: Callable[..., Awaitable[Any]], pack: Pack, request: Any, context: Any) -> bytes:
        return pack(await method(checked(request), context))

    async def _write(self, method: Callable[..., Any], pack: Pack, request: Any, context: Any) -> None:
        outlet = Outlet(context, pack, self._stalls)
        if not inspect.isasyncgenfunction(method):
            await method(checked(request), outlet)
            return
        async with contextlib.aclosing(method(checked(request), context)) as messages:
            async for message in messages:
                await outlet.write(message)

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
        except (grpc.aio.AbortError, grpc.aio.InternalError):  # told, or nobody is there to be told
            raise
        except asyncio.CancelledError:
            await abort(context, self._why_cancelled(task))
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
            return shutting_down()
        raise asyncio.CancelledError

    def _enter(self, task: asyncio.Task[Any]) -> None:
        self._running.add(task)
        self._last_call_s = time.monotonic()
        self._idle.clear()

    def _leave(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        self._evicted.discard(task)
        if not self._running:
            self._idle.set()
