"""A small HTTP server on a thread of its own: GET and HEAD, one request a connection, everything bounded.

Whoever connects is let in at the price of the connection that has been open longest, so that clients which dawdle or
say nothing never shut out one that asks and reads. The event loop that serves gRPC takes no part.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import NamedTuple

log = logging.getLogger(__name__)

MOST_CONNECTIONS = 64
# From the connection to the last byte of the answer.
PATIENCE_S = 5.0
MOST_HEAD_BYTES = 8192
METHODS = ("GET", "HEAD")


class Answer(NamedTuple):
    """``headers`` beside those that every answer has."""

    status: HTTPStatus
    content_type: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()


class Question(NamedTuple):
    """``path`` without the query; ``accept`` as the client sent it, empty without."""

    path: str
    accept: str


def text(status: HTTPStatus, line: str, *headers: tuple[str, str]) -> Answer:
    return Answer(status, "text/plain; charset=utf-8", f"{line}\n".encode(), headers)


class HttpServer:
    """``answer`` is called on the server's thread, as are ``beside``, coroutines that run as long as it does."""

    def __init__(
        self,
        host: str,
        port: int,
        answer: Callable[[Question], Awaitable[Answer]],
        beside: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._host = host
        self._port = port
        self._answer = answer
        self._beside = beside
        self._connections: dict[asyncio.Task[None], None] = {}  # the oldest first
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._socket: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def address(self) -> str:
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{host}:{self.port}"

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1]) if self._socket is not None else self._port

    @property
    def num_open(self) -> int:
        return len(self._connections)

    def start(self) -> None:
        """Listen and answer from now on. Raises RuntimeError when the address cannot be had."""
        try:
            self._socket = _listener(self._host, self._port)
        except (OSError, ValueError) as error:  # the latter: no name at all
            problem = getattr(error, "strerror", None) or error
            raise RuntimeError(f"cannot listen on {self.address}: {problem}") from error
        self._loop = asyncio.new_event_loop()
        self._thread.start()

    def stop(self) -> None:
        """End the thread; idempotent, and harmless before ``start``."""
        if self._loop is not None and self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # it has just ended
                self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    # -- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        assert self._loop is not None
        with contextlib.closing(self._loop) as loop:
            loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connected, sock=self._socket, limit=MOST_HEAD_BYTES)
        beside = asyncio.ensure_future(self._beside()) if self._beside is not None else None
        await self._stop.wait()
        server.close()
        ending = [*self._connections, *((beside,) if beside is not None else ())]
        for task in ending:
            task.cancel()
        if ending:
            await asyncio.wait(ending, timeout=PATIENCE_S)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = None
        if len(self._connections) > MOST_CONNECTIONS:
            next(iter(self._connections)).cancel()
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self._talk(reader, writer)
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            writer.transport.abort()
        except Exception:
            log.exception("the status page could not be made")
            writer.transport.abort()
        finally:
            self._connections.pop(task, None)

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.set_write_buffer_limits(0)  # so that drain waits for the last byte
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            method, question = _parse(head)
        except asyncio.LimitOverrunError:
            method, question = "GET", None
        if question is None:
            answer = text(HTTPStatus.BAD_REQUEST, f"not a request of HTTP/1 of at most {MOST_HEAD_BYTES} bytes")
        elif method not in METHODS:
            answer = text(HTTPStatus.METHOD_NOT_ALLOWED, "allowed: GET, HEAD", ("Allow", ", ".join(METHODS)))
        else:
            answer = await self._answer(question)
        writer.write(_head_of(answer) + (b"" if method == "HEAD" else answer.body))
        await writer.drain()
        writer.close()
        await writer.wait_closed()


def _listener(host: str, port: int) -> socket.socket:
    """On ``::`` for IPv4 as well, as gRPC listens. Of a name with several addresses the first one, IPv4 before IPv6."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
    both = host == "::" and socket.has_dualstack_ipv6()
    return socket.create_server(address, family=family, backlog=128, dualstack_ipv6=both)


def _parse(head: bytes) -> tuple[str, Question | None]:
    """Method and question; no question when it is not HTTP/1."""
    first, *lines = head.decode("latin-1").split("\r\n")
    parts = first.split(" ")
    if len(parts) != 3 or not parts[1].startswith("/") or not parts[2].startswith("HTTP/1."):
        return "GET", None
    fields = (line.partition(":") for line in lines)
    accepts = [value.strip() for name, _, value in fields if name.lower() == "accept"]
    return parts[0], Question(parts[1].partition("?")[0], ", ".join(accepts))


def _head_of(answer: Answer) -> bytes:
    lines = [
        f"HTTP/1.1 {answer.status.value} {answer.status.phrase}",
        f"Content-Type: {answer.content_type}",
        f"Content-Length: {len(answer.body)}",
        "Cache-Control: no-store",
        "X-Content-Type-Options: nosniff",
        "Connection: close",
        *(f"{name}: {value}" for name, value in answer.headers),
    ]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")
