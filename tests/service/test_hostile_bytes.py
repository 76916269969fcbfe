"""Clients that break the rules: each is refused or let go, and the next well-behaved call is answered."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import gzip
import os
import random
import socket
import struct
import zlib
from collections.abc import AsyncIterator

import grpc
import psutil
import pytest

from pyruntime.service import listeners
from pyruntime.v1 import embed_pb2, embed_pb2_grpc, generate_pb2
from tests.service.conftest import Stack, failure_of
from tests.service.test_incoming import bomb
from tests.service.test_tls import names
from tests.service.transport import (
    GENERATE,
    LIST_MODELS,
    STREAM,
    Certificates,
    RawClient,
    by_hand,
    frame,
    running,
    settings,
    stack_of,
)

EMBED_STREAM = "/pyruntime.v1.EmbedService/EmbedStream"
GOOD = frame(generate_pb2.GenerateRequest(model="decoder", text="hi").SerializeToString())
INVALID, EXHAUSTED, UNIMPLEMENTED = 3, 8, 12


@pytest.fixture
async def site() -> AsyncIterator[Stack]:
    async with stack_of(settings(client_stall_s=1)) as stack:
        yield stack
        await is_well(stack)


async def is_well(stack: Stack) -> None:
    """Another client is answered, and at the end of the attack no call is left inside."""
    answer = await stack.generate.Generate(generate_pb2.GenerateRequest(model="decoder", text="hi"), timeout=20)
    assert answer.completions[0].text == "ok"
    for _ in range(1000):
        if stack.server.num_running == 0:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{stack.server.num_running} calls are still open")


# -- messages -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [GENERATE, STREAM, EMBED_STREAM, "/grpc.health.v1.Health/Check"])
@pytest.mark.parametrize("raw", [b"\xff" * 50, b"\x0a\x05abc", b"\x0a\x02\xff\xfe", b"\x1f\x8b garbage", b"\x00" * 9])
async def test_bytes_that_are_no_message(site, path, raw, caplog):
    answer = await by_hand(site.server.port, path, frame(raw))
    assert answer.code == INVALID, answer
    assert not [record for record in caplog.records if record.exc_info]  # no stack in the log for each


async def test_the_error_of_a_bad_message_has_its_details(site):
    call = site.channel.unary_unary(GENERATE, request_serializer=bytes)(b"\xff\xff")
    failure = await failure_of(call)
    assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_MESSAGE")


async def test_a_bad_message_ends_its_stream_behind_the_good_ones(site):
    good = embed_pb2.EmbedRequest(model="encoder", inputs=[{"text": "a"}]).SerializeToString()
    answer = await by_hand(site.server.port, EMBED_STREAM, frame(good) + frame(b"\xff"))
    assert answer.code == INVALID
    size = struct.unpack(">I", answer.data[1:5])[0]
    assert len(embed_pb2.EmbedResponse.FromString(answer.data[5 : 5 + size]).results) == 1


@pytest.mark.parametrize("path", [GENERATE, STREAM, EMBED_STREAM])
async def test_a_length_that_lies(site, path):
    port, body = site.server.port, GOOD[5:]
    lies = [len(body) + 10, len(body) - 3, 2**31 - 1, 100_000, 0]
    wire = [*(frame(body, length=length) for length in lies), b"\x00\x00", b"", frame(body, compressed=7)]
    for data in wire:
        answer = await by_hand(port, path, data)
        assert answer.ended
        assert path == EMBED_STREAM or answer.code not in (0, None), (data, answer)


async def test_half_messages_whose_clients_go_away(site):
    def work() -> None:
        for part in range(1, len(GOOD)):
            with RawClient(site.server.port) as client:
                client.send(client.open(random.Random(part).choice([GENERATE, STREAM])), GOOD[:part], end=False)

    await asyncio.to_thread(work)


# -- compression --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [GENERATE, LIST_MODELS, "/grpc.health.v1.Health/Check"])
async def test_gzip_is_taken(site, path):
    body = GOOD[5:] if path == GENERATE else b""
    answer = await by_hand(site.server.port, path, frame(gzip.compress(body), compressed=1), grpc_encoding="gzip")
    assert answer.code == 0


async def test_gzip_of_a_real_client(site):
    async with grpc.aio.insecure_channel(site.address, compression=grpc.Compression.Gzip) as channel:
        request = embed_pb2.EmbedRequest(model="encoder", inputs=[{"text": "a" * 60}])
        answer = await embed_pb2_grpc.EmbedServiceStub(channel).Embed(request)
        assert answer.results[0].prompt_tokens == 61


async def test_deflate_is_refused(site):
    body = frame(zlib.compress(b""), compressed=1)
    assert (await by_hand(site.server.port, LIST_MODELS, body, grpc_encoding="deflate")).code == UNIMPLEMENTED


@pytest.mark.parametrize("path", [GENERATE, EMBED_STREAM])
async def test_a_bomb_is_not_decompressed(site, path):
    body = frame(bomb(90), compressed=1)
    assert len(body) < 100_000
    answer = await by_hand(site.server.port, path, body, grpc_encoding="gzip")
    assert answer.code == EXHAUSTED


# -- connections and headers --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        os.urandom(65536),
        b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00" * 4096,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 4096,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PRI * HT",
    ],
    ids=["noise", "http1", "zeros", "ones", "tls", "half"],
)
async def test_bytes_that_are_no_http2(site, data):
    def work() -> None:
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", site.server.port)) as raw:
                raw.sendall(data)

    await asyncio.to_thread(work)


async def test_headers_beyond_the_limit(site):
    """The limit holds from when the client has acknowledged it; one that does not is let go after a minute."""

    def code(headers: list[tuple[str, str]]) -> int | None:
        with RawClient(site.server.port) as client:
            while not client.http.remote_settings.max_header_list_size:
                client.read()
            return client.call(LIST_MODELS, frame(b""), headers).code

    assert await asyncio.to_thread(code, [("x-large", "a" * 12_000)]) == 0
    for headers in ([("x-huge", "a" * 40_000)], [(f"x-{place}", "b" * 20) for place in range(1000)]):
        assert await asyncio.to_thread(code, headers) == EXHAUSTED


async def test_headers_that_never_end(site):
    """A HEADERS frame and then CONTINUATION after CONTINUATION, none of them the last: 100 MB of header."""
    before = psutil.Process().memory_info().rss

    def work() -> None:
        with RawClient(site.server.port) as client, contextlib.suppress(OSError):
            piece = b"\x00\x07padding" + b"\x7f\x81\x7c" + b"x" * 16_000
            for number in range(6_500):
                kind = 9 if number else 1
                client.socket.sendall(len(piece).to_bytes(3, "big") + bytes([kind, 0]) + (1).to_bytes(4, "big") + piece)

    attack = asyncio.create_task(asyncio.to_thread(work))
    await is_well(site)
    await attack
    assert psutil.Process().memory_info().rss - before < 64 * 2**20


@pytest.mark.parametrize(
    "changes",
    [
        {"content-type": "text/plain"},
        {"content-type": "application/json"},
        {":method": "GET"},
        {"te": "nothing"},
        {"grpc-timeout": "soon"},
        {"grpc-encoding": "zstd"},
        {"grpc-timeout": "-1S"},
    ],
    ids=str,
)
async def test_headers_that_are_not_grpc(site, changes):
    answer = await by_hand(site.server.port, LIST_MODELS, frame(b""), **changes)
    assert answer.ended, "no answer at all"


@pytest.mark.parametrize("path", ["/", "//", "/pyruntime.v1.GenerateService/", "/x/y", "/pyruntime.v1.No/No", "/%00"])
async def test_methods_that_do_not_exist(site, path):
    answer = await by_hand(site.server.port, path, GOOD)
    assert answer.code == UNIMPLEMENTED


async def test_a_flood_of_resets(site):
    """Calls that are opened and reset at once, by the thousand."""

    def work() -> None:
        for _ in range(5):
            with RawClient(site.server.port) as client:
                for _ in range(500):
                    stream = client.open(GENERATE)
                    client.http.send_data(stream, GOOD, end_stream=True)
                    client.http.reset_stream(stream)
                    try:
                        client.flush()
                    except OSError:
                        break

    attack = asyncio.create_task(asyncio.to_thread(work))
    await is_well(site)
    await attack


async def test_many_connections(site):
    """Opened, left, opened again; and many at once that say nothing."""

    def work() -> None:
        for _ in range(300):
            socket.create_connection(("127.0.0.1", site.server.port)).close()
        silent = [socket.create_connection(("127.0.0.1", site.server.port)) for _ in range(200)]
        for each in silent:
            each.close()

    attack = asyncio.create_task(asyncio.to_thread(work))
    await is_well(site)
    await attack


async def test_half_a_tls_handshake(tmp_path, monkeypatch):
    monkeypatch.setattr(listeners, "HANDSHAKE_S", 1)
    files = Certificates(tmp_path)
    async with running(files.settings()) as (server, _):
        silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(50)]
        for each in silent:
            each.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
        assert await names(server.address, files.client()) == ["decoder", "encoder"]
        for each in silent:  # and they are let go in the end
            each.settimeout(10)
            assert await asyncio.to_thread(each.recv, 1) == b""
            each.close()


# -- memory -------------------------------------------------------------------------------------------


async def test_memory_stays_level(site):
    """Rounds of all of it: after the first, no round leaves anything behind that grows."""
    rounds = []
    packed = frame(bomb(80), compressed=1)
    for seed in range(4):
        for _ in range(2):
            await by_hand(site.server.port, GENERATE, packed, grpc_encoding="gzip")
        for _ in range(10):
            noise = random.Random(seed).randbytes(50_000)
            await by_hand(site.server.port, random.Random(seed).choice([GENERATE, STREAM, LIST_MODELS]), frame(noise))
        await test_half_messages_whose_clients_go_away(site)
        await is_well(site)
        gc.collect()
        rounds.append(psutil.Process().memory_info().rss)
    assert rounds[-1] - rounds[1] < 24 * 2**20, rounds
