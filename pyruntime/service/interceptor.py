"""Applied once to every RPC of this project: errors become statuses, and running calls are counted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, NoReturn

import grpc

from pyruntime.service.status import DETAILS_KEY, code_of, to_status

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

    def __init__(self) -> None:
        self.num_running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._wrapped: dict[str, grpc.RpcMethodHandler] = {}

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
            self._enter()
            try:
                return await method(request, context)
            except grpc.aio.AbortError:
                raise
            except Exception as error:
                await abort(context, error)
            finally:
                self._leave()

        return call

    def _streaming(self, method: Callable[..., AsyncGenerator[Any, None]]) -> Callable[..., Awaitable[None]]:
        # A coroutine that writes, rather than an async generator: when the call is cancelled between two messages, a
        # coroutine is cancelled at once, while a generator would linger until it is collected.
        async def call(request: Any, context: grpc.aio.ServicerContext) -> None:
            self._enter()
            try:
                async with contextlib.aclosing(method(request, context)) as messages:
                    async for message in messages:
                        await context.write(message)
            except grpc.aio.AbortError:
                raise
            except Exception as error:
                await abort(context, error)
            finally:
                self._leave()

        return call

    def _enter(self) -> None:
        self.num_running += 1
        self._idle.clear()

    def _leave(self) -> None:
        self.num_running -= 1
        if self.num_running == 0:
            self._idle.set()
