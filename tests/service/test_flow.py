"""Deadlines, slow readers and clients that go away, over a real channel and a real engine with a fake model."""

from __future__ import annotations

import asyncio
import logging
import string
import threading
import time
from collections.abc import AsyncIterator

import grpc
import pytest

from pyruntime.config import Settings
from pyruntime.engine import Engine
from pyruntime.errors import DeadlinePassed
from pyruntime.registry import GenerationDefaults, ModelRegistry, ServedModel
from pyruntime.scheduler.blocks import BlockPool
from pyruntime.scheduler.scheduler import Scheduler
from pyruntime.service.generate import GenerateServicer
from pyruntime.service.outlet import Outlet
from pyruntime.service.room import ServiceRoom
from pyruntime.service.server_builder import build_server
from pyruntime.service.stalls import Stalls
from pyruntime.types import Capability, SampledToken
from pyruntime.v1 import common_pb2, generate_pb2, generate_pb2_grpc
from tests.fake_compute import FakeModel, until
from tests.fakes import EOS, byte_tokenizer, fake_model
from tests.service.conftest import failure_of

BUFFER = 32
CONTEXT = 8000
# Far less than what a stream of CONTEXT tokens with their log-probabilities takes, and not left to be adjusted.
SMALL_WINDOW = [("grpc.http2.lookahead_bytes", 16384), ("grpc.http2.bdp_probe", 0)]


class Alphabet(FakeModel):
    """Continues every prompt with the alphabet, over and over."""

    def read(self, hidden, batch):
        rows = [rows.sequence for rows in batch.rows if rows.reads]
        return [SampledToken(ord(letter(s.num_generated)), -0.5, self._top) for s in rows]

    _top = tuple((token, -1.0) for token in range(97, 117))


def letter(place: int) -> str:
    return string.ascii_lowercase[place % 26]


def alphabet(length: int) -> str:
    return "".join(map(letter, range(length)))


def request(count: int, *, wide: bool = False, text: str = "hi") -> generate_pb2.GenerateRequest:
    logprobs = generate_pb2.LogprobOptions(enabled=True, top=20) if wide else None
    return generate_pb2.GenerateRequest(text=text, logprobs=logprobs, stop=generate_pb2.Stop(max_new_tokens=count))


class Site:
    """A server with one model, and what its parts are doing."""

    def __init__(self) -> None:
        self.model = Alphabet()
        info = fake_model("m", {Capability.GENERATE}, context_length=CONTEXT).info
        scheduler = Scheduler(BlockPool(2000, 16), 2048, 64)
        self.engine = Engine(info, scheduler, self.model, self.model, self.model, stream_buffer_tokens=BUFFER)
        self.tokenizer = byte_tokenizer()
        self.registry = ModelRegistry()
        self.registry.declare("m")
        defaults = GenerationDefaults(eos_token_ids=frozenset({EOS}))
        self.registry.set_serving("m", ServedModel(info, self.engine, self.tokenizer, defaults))
        self.settings = Settings(port=0)

    async def start(self) -> None:
        self.server = build_server(self.registry, self.settings)
        await self.server.start()

    def channel(self, options: list | None = None) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(f"127.0.0.1:{self.server.port}", options=options)

    async def freed(self) -> None:
        await until(lambda: self.engine.num_open == 0 and self.engine.load().num_requests == 0)
        assert (self.engine.num_blocks_used, self.engine.load().num_queued_tokens) == (0, 0)

    @property
    def num_paused(self) -> int:
        return self.engine.load().scheduler.num_paused

    def let_go(self) -> None:
        self.model.hold = False
        for _ in range(10):
            self.model.released.release()


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    made = Site()
    await made.start()
    yield made
    made.let_go()
    await made.server.drain(0)
    await asyncio.to_thread(made.engine.close)


@pytest.fixture
async def channel(site: Site) -> AsyncIterator[grpc.aio.Channel]:
    async with site.channel(SMALL_WINDOW) as made:
        yield made


@pytest.fixture
def stub(channel: grpc.aio.Channel) -> generate_pb2_grpc.GenerateServiceStub:
    return generate_pb2_grpc.GenerateServiceStub(channel)


async def text_of(call) -> str:
    texts = []
    while (chunk := await call.read()) is not grpc.aio.EOF:
        texts.append(chunk.text)
    return "".join(texts)


async def test_a_slow_reader_holds_its_own_stream_and_loses_nothing(site, stub):
    slow = stub.GenerateStream(request(3000, wide=True))
    first = (await slow.read()).text
    (job,) = site.engine._loop._jobs
    # Had the slow one gone on as these do, it would have ended before them.
    assert await text_of(stub.GenerateStream(request(3000))) == alphabet(3000)
    assert (await stub.Generate(request(3000))).completions[0].text == alphabet(3000)
    await until(lambda: site.num_paused == 1)
    assert job._num_sent < 1000
    assert len(job.inbox._events) <= BUFFER + 2
    assert first + await text_of(slow) == alphabet(3000)
    await site.freed()


async def test_a_slow_reader_that_goes_away_frees_everything(site, stub):
    slow = stub.GenerateStream(request(3000, wide=True))
    await slow.read()
    await until(lambda: site.num_paused == 1)
    slow.cancel()
    await site.freed()


async def test_a_slow_reader_whose_connection_breaks_frees_everything(site):
    connections = []

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        while data := await reader.read(2**16):
            writer.write(data)

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up, down = await asyncio.open_connection("127.0.0.1", site.server.port)
        await asyncio.gather(relay(reader, down), relay(up, writer), return_exceptions=True)

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as middle:
        address = f"127.0.0.1:{middle.sockets[0].getsockname()[1]}"
        async with grpc.aio.insecure_channel(address, options=SMALL_WINDOW) as channel:
            slow = generate_pb2_grpc.GenerateServiceStub(channel).GenerateStream(request(3000, wide=True))
            await slow.read()
            await until(lambda: site.num_paused == 1)
            for writer in connections:
                writer.transport.abort()
            await site.freed()


async def test_a_slow_reader_does_not_hold_a_drain_up(site, stub, caplog):
    slow = stub.GenerateStream(request(3000, wide=True))
    await slow.read()
    await until(lambda: site.num_paused == 1)
    with caplog.at_level(logging.ERROR):
        await site.server.drain(0)
    await site.freed()
    assert caplog.records == []


async def test_a_slow_readers_deadline_frees_everything(site, stub):
    slow = stub.GenerateStream(request(3000, wide=True), timeout=1.5)
    await slow.read()
    await until(lambda: site.num_paused == 1 or site.engine.num_open == 0)
    await site.freed()


async def test_cancelled_while_its_text_is_tokenised(site, stub):
    entered, go_on = threading.Event(), threading.Event()
    encode = site.tokenizer.encode

    def slow_encode(text, **options):
        entered.set()
        go_on.wait()
        return encode(text, **options)

    site.tokenizer.encode = slow_encode
    call = stub.Generate(request(5, text="x" * 4000))
    await asyncio.to_thread(entered.wait)
    load = site.engine.load()
    assert (load.num_requests, site.engine.num_open) == (1, 0)
    assert load.num_queued_tokens > 0
    call.cancel()
    await site.freed()
    go_on.set()
    site.tokenizer.encode = encode
    assert (await stub.Generate(request(5))).completions[0].text == "abcde"
    assert len(site.model.batches) == 5  # nothing of the cancelled one


async def test_a_deadline_that_cannot_be_met_is_refused_before_tokenising(site, stub):
    for _ in range(20):
        site.engine._admission.note(1, 1, 0.1, left_some=True)
    site.model.hold = True
    prompt = generate_pb2.GenerateRequest(token_ids=common_pb2.TokenIds(ids=[5] * 600))
    prompt.stop.max_new_tokens = 1
    first = stub.Generate(prompt)
    await asyncio.to_thread(site.model.entered.wait)
    site.tokenizer.encode = None  # it is not reached
    failure = await failure_of(stub.Generate(request(1), timeout=30))
    assert failure.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert failure.reason == "DEADLINE_PASSED"
    assert "cannot be met: 600 tokens come first, at 10 a second" in failure.message
    site.let_go()
    await first


class LateContext:
    """A call whose deadline passes without anybody cancelling it, and whose client takes everything at once."""

    def __init__(self, remaining_s: float) -> None:
        self._deadline = time.monotonic() + remaining_s

    def time_remaining(self) -> float:
        return self._deadline - time.monotonic()

    def add_done_callback(self, callback) -> None:
        pass

    async def write(self, message) -> None:
        pass


@pytest.mark.parametrize("streaming", [False, True])
async def test_the_engine_keeps_deadlines_by_itself(site, streaming):
    servicer = GenerateServicer(ServiceRoom(site.registry, site.settings))
    with pytest.raises(DeadlinePassed, match="before the answer was ready"):
        if streaming:
            await servicer.GenerateStream(request(7000), Outlet(LateContext(0.2), lambda _: b"", Stalls(0)))
        else:
            await servicer.Generate(request(7000), LateContext(0.2))
    await site.freed()


async def test_an_overloaded_server_says_when_to_come_back(site, stub):
    site.engine._admission._max_tokens = 100
    site.model.hold = True
    first = stub.Generate(request(1, text="x" * 98))
    await asyncio.to_thread(site.model.entered.wait)
    failure = await failure_of(stub.Generate(request(1, text="x" * 98)))
    assert failure.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert failure.retry_s == 1.0
    site.let_go()
    await first
