"""Clients that neither read nor send nor go away: what they hold is given back, and others never wait for it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc
import pytest

from pyruntime.config import Settings
from pyruntime.v1 import generate_pb2, generate_pb2_grpc
from tests.fake_compute import until
from tests.service.conftest import failure_of
from tests.service.test_flow import SMALL_WINDOW, Site, alphabet, request, text_of
from tests.service.transport import GENERATE, STREAM, Answer, RawClient, frame

COUNT = 3000
# As short as a slow machine may be with its first call.
AGE = {"max_connection_age_s": 1.0, "max_connection_grace_s": 1.0}


@contextlib.asynccontextmanager
async def site_with(stall_s: float, **changes: float) -> AsyncIterator[Site]:
    made = Site()
    made.settings = Settings.model_validate({"port": 0, "client_stall_s": stall_s} | changes)
    await made.start()
    yield made
    made.let_go()
    await made.server.drain(0)
    await asyncio.to_thread(made.engine.close)


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with site_with(0.3) as made:
        yield made


async def test_a_stream_that_nobody_reads_ends(site):
    async with site.channel(SMALL_WINDOW) as channel:
        stub = generate_pb2_grpc.GenerateServiceStub(channel)
        call = stub.GenerateStream(request(COUNT, wide=True))
        first = (await call.read()).text
        await until(lambda: site.num_paused == 1)
        await site.freed()  # without the client's help
        assert site.server.num_running == 0  # so that a drain does not wait for it
        # And when it reads at last, it finds what it had been sent, and then why there is no more.
        texts = [first]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while True:
                texts.append((await call.read()).text)
        assert caught.value.code() is grpc.StatusCode.CANCELLED
        assert "client_stall_s" in caught.value.details()
        assert alphabet(COUNT).startswith("".join(texts)) and len("".join(texts)) < COUNT
        assert (await failure_of(call)).reason == "CLIENT_STALLED"


async def test_a_stream_without_any_window_ends(site):
    """Not even its first message can be sent."""
    wire = frame(request(COUNT).SerializeToString())

    def work() -> RawClient:
        client = RawClient(site.server.port, window=0)
        client.send(client.open(STREAM), wire)
        return client

    client = await asyncio.to_thread(work)
    await until(lambda: site.server.num_running == 1)
    await site.freed()
    await until(lambda: site.server.num_running == 0)
    client.socket.close()


async def test_a_slow_reader_is_none_that_has_stopped():
    """In all it takes longer than it may rest, but it never rests for so long."""
    async with site_with(1.0) as site, site.channel(SMALL_WINDOW) as channel:
        call = generate_pb2_grpc.GenerateServiceStub(channel).GenerateStream(request(600, wide=True))
        texts = []
        while (chunk := await call.read()) is not grpc.aio.EOF:
            texts.append(chunk.text)
            if len(texts) % 60 == 0:
                await asyncio.sleep(0.12)
        assert "".join(texts) == alphabet(600)


async def test_without_a_limit_it_waits_for_ever(site):
    async with site_with(0.0) as endless, endless.channel(SMALL_WINDOW) as channel:
        call = generate_pb2_grpc.GenerateServiceStub(channel).GenerateStream(request(COUNT, wide=True))
        first = (await call.read()).text
        await until(lambda: endless.num_paused == 1)
        # As long as the other server's limit, by that server's own clock.
        async with site.channel(SMALL_WINDOW) as other:
            stalled = generate_pb2_grpc.GenerateServiceStub(other).GenerateStream(request(COUNT, wide=True))
            await stalled.read()
            await site.freed()
        assert first + await text_of(call) == alphabet(COUNT)


async def test_a_request_that_does_not_arrive_ends(site):
    wire = frame(generate_pb2.GenerateRequest(model="m", text="hi").SerializeToString())

    def work(path: str, sent: int) -> Answer:
        with RawClient(site.server.port) as client:
            stream = client.open(path)
            client.send(stream, wire[:sent], end=False)
            return client.finish(stream)

    cases = [(path, sent) for path in (GENERATE, STREAM) for sent in (0, 3, 9)]
    answers = await asyncio.gather(*(asyncio.to_thread(work, *case) for case in cases))
    for case, answer in zip(cases, answers, strict=True):
        assert answer.code == grpc.StatusCode.CANCELLED.value[0], case
        assert "client_stall_s" in answer.headers["grpc-message"], case
        assert answer.ended in ("StreamEnded", "StreamReset"), case


@pytest.mark.parametrize(("changes", "headers"), [({}, {"grpc_timeout": "500m"}), (AGE, {})])
async def test_an_answer_that_nobody_reads_goes_with_its_deadline_or_its_connection(changes, headers):
    async with site_with(0.3, **changes) as site:

        def work() -> RawClient:
            client = RawClient(site.server.port, window=0)
            client.send(client.open(GENERATE, **headers), frame(request(5).SerializeToString()))
            return client

        calls = site.server._interceptor._num_open
        client = await asyncio.to_thread(work)
        await until(lambda: calls.total() == 1)
        await site.freed()
        assert site.server.num_running == 0  # what is left of it is the answer
        await until(lambda: calls.total() == 0)
        client.socket.close()
