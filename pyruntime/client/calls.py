"""Calls of the blocking client: deadlines, request ids, and attempts until one succeeds."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import grpc

from pyruntime.client.bulk import IN_FLIGHT
from pyruntime.client.errors import ApiError, closed_error, ended_early_error
from pyruntime.client.request_ids import metadata_of, request_id_of, sendable
from pyruntime.client.retry import Attempts, Retry, checked_timeout


@contextlib.contextmanager
def api_errors(request_id: str = "") -> Iterator[None]:
    """``grpc.RpcError`` as ``ApiError``."""
    try:
        yield
    except grpc.RpcError as error:
        raise ApiError.from_rpc(error, request_id) from error


class Calls:
    """What the methods of ``Client`` have in common.

    timeout_s   deadline of a call in seconds, all its attempts included, unless the call gives its own
    """

    def __init__(self, timeout_s: float | None, retry: Retry) -> None:
        self._timeout_s = None if timeout_s is None else checked_timeout(timeout_s)
        self._retry = retry
        self._reached = False
        self._closed = threading.Event()

    def close(self) -> None:
        """Nothing is sent any more; whoever waits to try again is told."""
        self._closed.set()

    def answer(
        self, method: Callable[..., Any], request: Any, timeout_s: float | None = None, *, patient: bool = False
    ) -> Any:
        """The response of a unary method. ``patient``: it is one part of bulk work."""
        attempts = Attempts(self._retry, self._seconds(timeout_s), bulk=patient, reached=self._reached)
        request_id = request_id_of(request)
        while True:
            self._check_open()
            try:
                with self._sending(request_id):
                    response = method(request, timeout=attempts.remaining_s(), metadata=metadata_of(request_id))
                self._reached = True
                return response
            except ApiError as error:
                wait_s = attempts.wait_s(error)
            self._pause(wait_s)

    def stream(self, method: Callable[..., Any], request: Any, timeout_s: float | None = None) -> Iterator[Any]:
        """The messages of a server's stream. Tried again until the first of them has come, not after it."""
        attempts = Attempts(self._retry, self._seconds(timeout_s))
        request_id, has_begun = request_id_of(request), False
        while True:
            self._check_open()
            with self._sending(request_id):
                call = method(request, timeout=attempts.remaining_s(), metadata=metadata_of(request_id))
            try:
                with api_errors(request_id):
                    for message in call:
                        has_begun = True
                        yield message
                    return
            except ApiError as error:
                if has_begun:
                    raise
                wait_s = attempts.wait_s(error)
            finally:
                call.cancel()
            self._pause(wait_s)

    def resumed(
        self,
        method: Callable[..., Any],
        requests: Iterator[Any],
        timeout_s: float | None = None,
        request_id: str | None = None,
    ) -> Iterator[Any]:
        """One response a request, in order, of a method with streams both ways.

        A few requests are under way at a time. When the connection breaks, those without a response are sent again.
        ``timeout_s``: for all of it; None: no deadline.
        """
        attempts, name = Attempts(self._retry, timeout_s, bulk=True, reached=self._reached), sendable(request_id)
        link = _Link(method, name)
        try:
            while True:
                for request in islice(requests, IN_FLIGHT - link.num_pending):
                    link.send(request)
                if not link.num_pending:
                    link.finish()
                    return
                self._check_open()
                try:
                    with self._sending(name):
                        response = link.next(attempts.remaining_s())
                except ApiError as error:
                    link.close()
                    self._pause(attempts.wait_s(error))
                    continue
                attempts.answered()
                self._reached = True
                yield response
        finally:
            link.close()

    def _seconds(self, timeout_s: float | None) -> float | None:
        return self._timeout_s if timeout_s is None else timeout_s

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise closed_error()

    @contextlib.contextmanager
    def _sending(self, request_id: str) -> Iterator[None]:
        try:
            with api_errors(request_id):
                yield
        except ValueError:
            self._check_open()  # grpc's word for a client that was closed a moment ago
            raise

    def _pause(self, seconds: float) -> None:
        """Until then, or until the client is closed."""
        self._closed.wait(seconds)


class _Link:
    """A stream both ways that can be opened again: what has no response yet is sent anew then."""

    def __init__(self, method: Callable[..., Any], request_id: str) -> None:
        self._method = method
        self._metadata = metadata_of(request_id)
        self._pending: deque[Any] = deque()
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._call: Any = None

    @property
    def num_pending(self) -> int:
        """Requests without a response."""
        return len(self._pending)

    def send(self, request: Any) -> None:
        self._pending.append(request)
        self._requests.put(request)

    def next(self, timeout_s: float | None) -> Any:
        """The next response. Raises ``grpc.RpcError``, or ApiError when the server has ended the stream before it."""
        if self._call is None:
            self._call = self._method(iter(self._requests.get, None), timeout=timeout_s, metadata=self._metadata)
        response = next(self._call, None)
        if response is None:
            raise ended_early_error()
        self._pending.popleft()
        return response

    def finish(self) -> None:
        """The orderly end. Everything is answered: what becomes of the stream now is of no account."""
        if self._call is not None:
            self._requests.put(None)
            with contextlib.suppress(grpc.RpcError):
                next(self._call, None)

    def close(self) -> None:
        """Over, until ``next`` is called."""
        if self._call is not None:
            self._requests.put(None)  # grpc's own thread waits for it
            self._call.cancel()
            self._call = None
            self._requests = queue.SimpleQueue()
            for request in self._pending:
                self._requests.put(request)
