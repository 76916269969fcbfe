"""Small real models behind a real channel, for some seconds, four times as busy as they can be.

Calls are cancelled, given deadlines and priorities, read slowly, and cut off with their connection; steps fail, and are
run again in halves. Each call ends in exactly one right way, whatever is answered is what the same request gets when
it is alone, and nothing is left behind.
"""

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import time
from collections import Counter
from random import Random

import grpc
import pytest
from google.rpc import status_pb2
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from pyruntime.config import Settings
from pyruntime.registry import ModelRegistry
from pyruntime.scheduler.sequence import Sequence
from pyruntime.service.server_builder import build_server
from pyruntime.serving import load_served_model
from pyruntime.v1 import embed_pb2_grpc, generate_pb2_grpc, score_pb2_grpc
from tests.fake_compute import until
from tests.models.chaos_requests import DECODER, RANKER, MixedCalls
from tests.models.rank_folders import byte_level_tokenizer, save_model
from tests.service.conftest import unpack

NUM_CLIENTS, NUM_ADMITTED = 80, 10  # by each of two models: four times what is let in
# What the allocator keeps for reuse. A leak of every tenth call's state would be well above this.
MEMORY_SLACK = 24 * 2**20
# gRPC keeps the state of a channel's last call until the next one comes.
SEQUENCES_SLACK = 16
SMALL_WINDOW = [("grpc.http2.lookahead_bytes", 16384), ("grpc.http2.bdp_probe", 0)]
SETTINGS = Settings(
    port=0,
    dtype="float32",
    deterministic=True,
    kv_cache_bytes=2**20,  # 512 tokens, so that sequences are set back
    max_batch_tokens=96,
    max_running_sequences=24,
    max_queue_requests=NUM_ADMITTED,
    max_queue_tokens=2000,
    stream_buffer_tokens=8,
    priority_ageing_s=0.5,
)
FIELDS = {"num_key_value_heads": 4, "head_dim": 32, "num_labels": 3, "pad_token_id": 1, "eos_token_id": 1}
CODES = [
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNAVAILABLE,
]
ANSWERED = "answered"


@pytest.fixture
def models(tmp_path_factory):
    """A decoder and a decoder that classifies, which share the machine."""
    loaded = {}
    for name, factory in ((DECODER, AutoModelForCausalLM), (RANKER, AutoModelForSequenceClassification)):
        folder = tmp_path_factory.mktemp(name)
        size = len(byte_level_tokenizer(folder))
        save_model(folder, factory, "qwen3", size, **FIELDS)
        loaded[name] = load_served_model(name, str(folder), SETTINGS, lambda _: None)
    yield loaded
    for model in loaded.values():
        model.engine.close()


def fail_at_times(model, draw):
    """One step in a hundred fails, before its forward or behind it, but never one that has a single request."""
    compute = model.engine._steps._runner
    forward = compute.forward

    def faulty(batch):
        fails = len({rows.sequence.owner for rows in batch.rows}) > 1 and draw.random() < 0.01
        hidden = None if fails and draw.random() < 0.5 else forward(batch)
        if fails:
            raise MemoryError
        return hidden

    compute.forward = faulty


class Connections:
    """A relay before the server, whose connections are all cut from time to time."""

    def __init__(self, port):
        self._port = port
        self._writers = set()

    async def accept(self, reader, writer):
        with contextlib.suppress(OSError):
            up, down = await asyncio.open_connection("127.0.0.1", self._port)
            self._writers |= {writer, down}
            await asyncio.gather(self._relay(reader, down), self._relay(up, writer), return_exceptions=True)
            self._writers -= {writer, down}

    async def _relay(self, reader, writer):
        while data := await reader.read(2**16):
            writer.write(data)
            await writer.drain()  # a slow reader behind the relay is one before it too
        writer.close()

    def cut(self):
        for writer in self._writers:
            writer.transport.abort()


class Site:
    def __init__(self, models):
        self.models = models
        registry = ModelRegistry()
        for name, model in models.items():
            registry.declare(name)
            registry.set_serving(name, model)
        self.server = build_server(registry, SETTINGS)

    async def idle(self):
        """Everything has ended; afterwards nothing may be counted for anybody."""
        await until(lambda: self.server.num_running == 0)
        for model in self.models.values():
            engine = model.engine
            await until(lambda engine=engine: engine.num_open == 0 and engine.load().num_requests == 0)
            await until(lambda engine=engine: engine.load().scheduler == engine._scheduler.load())
            load, counts = engine.load(), engine.load().scheduler
            assert not engine.is_closed
            assert (load.num_queued_tokens, engine.num_blocks_used, counts.num_paused) == (0, 0, 0)
            assert counts.blocks_free == engine._scheduler.blocks.num_blocks
            for numbers in (counts.num_waiting, counts.waiting_tokens, counts.num_running, counts.running_tokens):
                assert not any(numbers.values())
            assert not engine._scheduler._population.groups._followers


class Client:
    """Sends one random call after the other and counts how each ended."""

    def __init__(self, channel, calls, seed, outcomes):
        self._stubs = {
            "generate": generate_pb2_grpc.GenerateServiceStub(channel),
            "embed": embed_pb2_grpc.EmbedServiceStub(channel),
            "score": score_pb2_grpc.ScoreServiceStub(channel),
        }
        self._calls = calls
        self._random = Random(seed)
        self._outcomes = outcomes

    async def run(self, until_s):
        while time.monotonic() < until_s:
            self._outcomes["sent"] += 1
            self._outcomes[await self._one()] += 1

    async def _one(self):
        draw = self._random
        kind = draw.choice(self._calls.kinds)
        timeout = draw.choice([0.001, 0.05, 0.3, 2.0]) if draw.random() < 0.3 else None
        call = kind.start(self._stubs, priority=draw.randint(-2, 2), timeout=timeout)
        slow = draw.random() < 0.3
        leaving = asyncio.get_running_loop().call_later(draw.uniform(0, 0.2), call.cancel)
        if draw.random() > 0.2:
            leaving.cancel()
        try:
            answer = await kind.read(call, 0.02 * slow)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                await asyncio.sleep(min(retry_s(error), 0.02))
            return error.code()
        except asyncio.CancelledError:  # grpc's way to say that this side cancelled the call
            assert call.cancelled()
            return grpc.StatusCode.CANCELLED
        finally:
            leaving.cancel()
        kind.check(answer)
        return ANSWERED


def retry_s(error):
    status = dict(error.trailing_metadata())["grpc-status-details-bin"]
    told = unpack(status_pb2.Status.FromString(status)).retry_s
    assert told > 0
    return told


def resident_bytes():
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)  # glibc's: give back what is free
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def num_sequences():
    gc.collect()
    return sum(type(each) is Sequence for each in gc.get_objects())


async def storm(site, calls, seconds, seed):
    """Half of the clients talk to the server itself, the others by way of the relay."""
    outcomes = Counter()
    middle = Connections(site.server.port)
    async with await asyncio.start_server(middle.accept, "127.0.0.1", 0) as relay:
        ports = [site.server.port, relay.sockets[0].getsockname()[1]]
        addresses = [f"127.0.0.1:{port}" for port in ports]
        channels = [grpc.aio.insecure_channel(address, options=SMALL_WINDOW) for address in addresses * 2]
        until_s = time.monotonic() + seconds
        clients = [Client(channels[i % 4], calls, (seed << 32) + i, outcomes) for i in range(NUM_CLIENTS)]
        running = asyncio.gather(*(client.run(until_s) for client in clients))
        while not running.done():
            await asyncio.wait([running], timeout=0.4)
            middle.cut()
        await running
        for channel in channels:
            await channel.close()
    await site.idle()
    return outcomes


@pytest.mark.parametrize("seconds", [4.0, pytest.param(20.0, marks=pytest.mark.slow)])
async def test_whatever_clients_do_each_call_ends_once_and_nothing_is_left(models, seconds, caplog):
    caplog.set_level(logging.CRITICAL, "pyruntime.step_runner")  # records of failed steps hold on to what was in them
    site = Site(models)
    await site.server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{site.server.port}") as channel:
        calls = await MixedCalls.answered_alone(channel, Random(5))
    for model in models.values():
        fail_at_times(model, Random(6))
    await storm(site, calls, seconds / 4, seed=1)
    level, kept = resident_bytes(), num_sequences()
    outcomes = await storm(site, calls, seconds * 3 / 4, seed=2)
    assert resident_bytes() <= level + MEMORY_SLACK
    assert num_sequences() <= kept + SEQUENCES_SLACK
    assert set(outcomes) == {"sent", ANSWERED, *CODES}, outcomes
    assert sum(outcomes.values()) == 2 * outcomes["sent"]
    await site.server.drain(0)
