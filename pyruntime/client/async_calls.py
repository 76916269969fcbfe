"""Calls of the client for asyncio; the twin of ``calls``, method for method."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from typing import Any

import grpc

from pyruntime.client.bulk import IN_FLIGHT
from pyruntime.client.calls import api_errors
from pyruntime.client.connection import running_loop
from pyruntime.client.errors import ApiError, closed_error, ended_early_error
from pyruntime.client.followed import OwnStatus
from pyruntime.client.request_ids import metadata_of, request_id_of, sendable
from pyruntime.client.retry import Attempts, Retry, checked_timeout


class AsyncCalls:
    """What the methods of ``AsyncClient`` have in common.

    timeout_s   deadline of a call in seconds, all its attempts included, unless the call gives its own
    """

    def __init__(self, timeout_s: float | None, retry: Retry) -> None:
        self._timeout_s = None if timeout_s is None else checked_timeout(timeout_s)
        self._retry = retry
        self._reached = False
        self._closed = asyncio.Event()
        self._loop = running_loop()

    def close(self) -> None:
        """Nothing is sent any more; whoever waits to try again is told."""
        self._closed.set()

    async def answer(
        self, method: Callable[..., Any], request: Any, timeout_s: float | None = None, *, patient: bool = False
    ) -> Any:
        """The response of a unary method. ``patient``: it is one part of bulk work."""
        attempts = Attempts(self._retry, self._seconds(timeout_s), bulk=patient, reached=self._reached)
        request_id = request_id_of(request)
        while True:
            self._check_open()
            call = method(request, timeout=attempts.remaining_s(), metadata=metadata_of(request_id))
            try:
                with self._following(call, request_id):
                    response = await call
                self._reached = True
                return response
            except ApiError as error:
                wait_s = attempts.wait_s(error)
            await self._pause(wait_s)

    async def stream(
        self, method: Callable[..., Any], request: Any, timeout_s: float | None = None
    ) -> AsyncGenerator[Any, None]:
        """The messages of a server's stream. Tried again until the first of them has come, not after it."""
        attempts = Attempts(self._retry, self._seconds(timeout_s))
        request_id, has_begun = request_id_of(request), False
        while True:
            self._check_open()
            call = method(request, timeout=attempts.remaining_s(), metadata=metadata_of(request_id))
            try:
                with self._following(call, request_id):
                    async for message in call:
                        has_begun = True
                        yield message
                    return
            except ApiError as error:
                if has_begun:
                    raise
                wait_s = attempts.wait_s(error)
            await self._pause(wait_s)

    async def resumed(
        self,
        method: Callable[..., Any],
        requests: AsyncIterator[Any],
        timeout_s: float | None = None,
        request_id: str | None = None,
    ) -> AsyncGenerator[Any, None]:
        """One response a request, in order, of a method with streams both ways.

        A few requests are under way at a time. When the connection breaks, those without a response are sent again.
        ``timeout_s``: for all of it; None: no deadline.
        """
        attempts, name = Attempts(self._retry, timeout_s, bulk=True, reached=self._reached), sendable(request_id)
        link = _Link(method, name)
        try:
            while True:
                while link.num_pending < IN_FLIGHT and (request := await anext(requests, None)) is not None:
                    link.send(request)
                if not link.num_pending:
                    await link.finish()
                    return
                self._check_open()
                try:
                    with self._reading(name):
                        response = await link.next(attempts.remaining_s())
                except ApiError as error:
                    link.close()
                    await self._pause(attempts.wait_s(error))
                    continue
                attempts.answered()
                self._reached = True
                yield response
        finally:
            link.close()

    def _seconds(self, timeout_s: float | None) -> float | None:
        return self._timeout_s if timeout_s is None else timeout_s

    def _check_open(self) -> None:
        if running_loop() is not self._loop:  # grpc would wait for ever, or fail in words of its own
            raise RuntimeError("this AsyncClient was made in another event loop; make one in each")
        if self._closed.is_set():
            raise closed_error()

    async def _pause(self, seconds: float) -> None:
        """Until then, or until the client is closed."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._closed.wait(), seconds)

    @contextlib.contextmanager
    def _following(self, call: Any, request_id: str) -> Iterator[None]:
        """The call is open inside, and over behind it, however it ends."""
        try:
            with self._reading(request_id):
                yield
        finally:
            call.cancel()

    @contextlib.contextmanager
    def _reading(self, request_id: str) -> Iterator[None]:
        try:
            with api_errors(request_id):
                yield
        except asyncio.CancelledError:
            # grpc tells of a call that ``close`` cancelled as if the task had been.
            task = asyncio.current_task()
            if self._closed.is_set() and not (task is not None and task.cancelling()):
                raise ApiError(
                    "CANCELLED", "the client was closed while the call was open", request_id=request_id
                ) from None
            raise


class _Link:
    """A stream both ways that can be opened again: what has no response yet is sent anew then."""

    def __init__(self, method: Callable[..., Any], request_id: str) -> None:
        self._method = method
        self._metadata = metadata_of(request_id)
        self._pending: deque[Any] = deque()
        self._requests: asyncio.Queue[Any] = asyncio.Queue()
        self._call: Any = None

    @property
    def num_pending(self) -> int:
        """Requests without a response."""
        return len(self._pending)

    def send(self, request: Any) -> None:
        self._pending.append(request)
        self._requests.put_nowait(request)

    async def next(self, timeout_s: float | None) -> Any:
        """The next response. Raises ``grpc.RpcError``, or ApiError when the server has ended the stream before it."""
        if self._call is None:
            self._call = self._method(_until_none(self._requests), timeout=timeout_s, metadata=self._metadata)
            self._responses = aiter(self._call)
            self._status = OwnStatus(self._call)
        try:
            response = await anext(self._responses, None)
        except grpc.aio.AioRpcError as error:
            raise await self._status.instead_of(error) from None
        if response is None:
            raise ended_early_error()
        self._pending.popleft()
        return response

    async def finish(self) -> None:
        """The orderly end. Everything is answered: what becomes of the stream now is of no account."""
        if self._call is not None:
            self._requests.put_nowait(None)
            with contextlib.suppress(grpc.RpcError):
                await anext(self._responses, None)

    def close(self) -> None:
        """Over, until ``next`` is called."""
        if self._call is not None:
            self._requests.put_nowait(None)  # grpc's own task waits for it
            self._call.cancel()
            self._call = None
            self._requests = asyncio.Queue()
            for request in self._pending:
                self._requests.put_nowait(request)


async def _until_none(requests: asyncio.Queue[Any]) -> AsyncIterator[Any]:
    while (request := await requests.get()) is not None:
        yield request
