"""The metrics port under clients that dawdle, talk nonsense or never read, over raw sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from http import HTTPStatus

import pytest

from pyruntime.telemetry import http, site
from pyruntime.telemetry.http import Answer, HttpServer, Question, text
from pyruntime.telemetry.site import LoopProbe, Reused
from tests.telemetry.help import Page, page_site

LONG = b"x" * 8 * 2**20


async def answer(question: Question) -> Answer:
    if question.path == "/bug":
        raise ValueError("a bug")
    if question.path == "/long":
        return Answer(HTTPStatus.OK, "text/plain", LONG)
    return text(HTTPStatus.OK, f"{question.path} {question.accept}")


@pytest.fixture
def server():
    server = HttpServer("127.0.0.1", 0, answer)
    server.start()
    yield server
    server.stop()
    assert not [thread for thread in threading.enumerate() if thread.name == "metrics"]


@pytest.fixture
def page(server):
    return Page(server.address)


def say(page: Page, data: bytes) -> bytes:
    """All that comes back for ``data``, until the server closes."""
    with page.connect() as connection:
        connection.sendall(data)
        return read_all(connection)


def read_all(connection: socket.socket) -> bytes:
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65536):
            found += part
    return found


async def test_get_and_head_and_nothing_else(page):
    status, headers, body = await page.get("/a?b=c", Accept="text/html")
    assert (status, body) == (200, b"/a text/html\n")
    assert headers["connection"] == "close"
    assert headers["x-content-type-options"] == "nosniff"
    status, headers, body = await page.get("/a", "HEAD")
    assert (status, body, headers["content-length"]) == (200, b"", "4")
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "TRACE"):
        status, headers, _ = await page.get("/a", method)
        assert (status, headers["allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize(
    "nonsense",
    [
        b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/2\r\n\r\n",
        b"GET http://elsewhere/ HTTP/1.1\r\n\r\n",
        b"GET /a b HTTP/1.1\r\n\r\n",
        b"\xff\xfe\x00 / \x80\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 5000 + b"\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    ],
)
def test_nonsense_is_refused(page, nonsense):
    got = say(page, nonsense)
    # What is still unread when the server closes may reset the connection before its answer is read.
    assert got.startswith(b"HTTP/1.1 400 ") or (not got and len(nonsense) > 8192)
    assert say(page, b"GET /a HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200 OK\r\n")


def test_an_answer_that_cannot_be_made_ends_its_connection_alone(page, caplog):
    assert say(page, b"GET /bug HTTP/1.1\r\n\r\n") == b""
    assert "the status page could not be made" in caplog.text
    assert b" 200 " in say(page, b"GET /a HTTP/1.1\r\n\r\n")


def test_those_who_say_nothing_make_room_for_those_who_ask(page):
    with contextlib.ExitStack() as idle:
        silent = [idle.enter_context(page.connect()) for _ in range(3 * http.MOST_CONNECTIONS)]
        assert b" 200 " in say(page, b"GET /a HTTP/1.1\r\n\r\n")
        assert read_all(silent[0]) == b""  # the oldest was let go


def test_half_a_request_is_not_waited_for_long(page, monkeypatch):
    monkeypatch.setattr(http, "PATIENCE_S", 0.2)
    assert say(page, b"GET /a HTTP/1.1\r\nAccept: ") == b""


def test_those_who_do_not_read_are_not_waited_for_long(server, page, monkeypatch):
    monkeypatch.setattr(http, "PATIENCE_S", 0.2)
    with page.connect() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.sendall(b"GET /long HTTP/1.1\r\n\r\n")
        assert b" 200 " in say(page, b"GET /a HTTP/1.1\r\n\r\n")
        deadline = time.monotonic() + 10
        while server.num_open and time.monotonic() < deadline:
            time.sleep(0.01)
        assert server.num_open == 0


def test_a_long_answer_comes_whole(page):
    head, _, body = say(page, b"GET /long HTTP/1.1\r\n\r\n").partition(b"\r\n\r\n")
    assert f"Content-Length: {len(LONG)}".encode() in head
    assert body == LONG


def test_a_taken_port_is_told():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = HttpServer("127.0.0.1", port, answer)
        with pytest.raises(RuntimeError, match=f"cannot listen on 127.0.0.1:{port}"):
            server.start()
        server.stop()


def test_ipv6():
    server = HttpServer("::1", 0, answer)
    try:
        server.start()
    except RuntimeError as error:
        pytest.skip(str(error))
    try:
        assert server.address == f"[::1]:{server.port}"
        with socket.create_connection(("::1", server.port), timeout=10) as connection:
            connection.sendall(b"GET /a HTTP/1.1\r\n\r\n")
            assert b" 200 " in read_all(connection)
    finally:
        server.stop()


async def test_liveness_notices_a_stuck_event_loop(monkeypatch):
    monkeypatch.setattr(site, "LOOP_PATIENCE_S", 0.1)
    stuck = asyncio.new_event_loop()  # never runs
    probe = LoopProbe(stuck)
    assert not await probe.ask()
    assert probe.lag_s >= 0.1
    stuck.close()
    assert not await probe.ask()
    assert await LoopProbe(asyncio.get_running_loop()).ask()


async def test_liveness_and_readiness_are_two_things():
    async with page_site() as (stack, page):
        assert (await page.get("/livez"))[0] == (await page.get("/readyz"))[0] == 200
        stack.registry.drain()
        assert (await page.get("/livez"))[::2] == (200, b"alive\n")
        assert (await page.get("/readyz"))[::2] == (503, b"not ready\n")
        assert (await page.metrics())["pyruntime_ready",] == 0
        assert (await page.status())["state"] == "draining"
        assert (await page.get("/gone"))[0] == 404


def test_answers_that_cost_time_are_given_again_for_a_while():
    made = []

    def make() -> bytes:
        made.append(time.monotonic())
        time.sleep(0.02)
        return str(len(made)).encode()

    reused = Reused(make)
    began = time.monotonic()
    while time.monotonic() < began + 0.5:
        reused.body()
    # Each costs 0.02 s and is good for nine times that.
    assert 1 <= len(made) <= 3


async def test_a_probe_that_is_cancelled_ends_whenever_that_is():
    """Also at the moment of its answer: else the metrics port could not be closed."""
    probe = LoopProbe(asyncio.get_running_loop())
    num_cancelled = 0
    for num_turns in range(12):
        asked = asyncio.create_task(probe.ask())
        for _ in range(num_turns):
            await asyncio.sleep(0)
        if asked.cancel():
            await asyncio.wait([asked])
            assert asked.cancelled()
            num_cancelled += 1
    assert num_cancelled >= 3


def test_every_address_means_both_kinds():
    server = HttpServer("::", 0, answer)
    try:
        server.start()
    except RuntimeError as error:
        pytest.skip(str(error))
    for host in ("127.0.0.1", "::1"):
        with socket.create_connection((host, server.port), timeout=10) as connection:
            connection.sendall(b"GET /a HTTP/1.1\r\n\r\n")
            assert b" 200 " in read_all(connection)
    server.stop()


@pytest.mark.parametrize("host", ["no.such.host.invalid", "a..b", "x" * 300])
def test_a_host_that_is_none_is_told(host):
    with pytest.raises(RuntimeError, match="cannot listen on"):
        HttpServer(host, 0, answer).start()


async def test_a_server_whose_event_loop_is_stuck_is_not_ready(monkeypatch):
    monkeypatch.setattr(site, "LOOP_PATIENCE_S", 0.1)
    async with page_site() as (_, page):
        assert (await page.get("/readyz"))[0] == 200
        answered = page._get("/readyz", "GET", {})  # which keeps this loop, that of the calls, from answering
        assert answered[::2] == (503, b"not ready\n")
        assert (await page.get("/readyz"))[0] == 200
