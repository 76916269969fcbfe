"""The open loop's client, against servers that answer when a test lets them."""

from __future__ import annotations

import asyncio
import importlib
import math
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc.aio
import pytest

from pyruntime.v1 import embed_pb2, embed_pb2_grpc, generate_pb2, generate_pb2_grpc

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture(autouse=True)
def room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def module(name: str) -> ModuleType:
    return importlib.import_module(name)


class Embed(embed_pb2_grpc.EmbedServiceServicer):
    """Refuses every third call; answers the others together, when the last one has come."""

    def __init__(self, calls: int) -> None:
        self._left, self._all = calls, asyncio.Event()

    async def Embed(self, request: Any, context: Any) -> embed_pb2.EmbedResponse:
        self._left -= 1
        if self._left == 0:
            self._all.set()
        if self._left % 3 == 1:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
        await self._all.wait()
        dense = embed_pb2.DenseEmbedding(packed=bytes(384 * 4), dimensions=384)
        answer = embed_pb2.EmbedResponse(results=[embed_pb2.EmbedResult(dense=dense) for _ in request.inputs])
        answer.usage.prompt_tokens = 10
        answer.usage.cached_tokens = 4
        return answer


class Generate(generate_pb2_grpc.GenerateServiceServicer):
    """As many tokens as asked for, in messages of at most five, and ``short`` less."""

    def __init__(self, short: int = 0) -> None:
        self._short = short

    async def GenerateStream(self, request: Any, context: Any) -> AsyncIterator[generate_pb2.GenerateChunk]:
        left = request.stop.max_new_tokens - self._short
        while left:
            chunk = generate_pb2.GenerateChunk(token_ids=[7] * min(5, left))
            left -= len(chunk.token_ids)
            if not left:
                chunk.usage.prompt_tokens = 12
            yield chunk


@asynccontextmanager
async def client_of(embed: Any, generate: Any) -> AsyncIterator[Any]:
    server = grpc.aio.server()
    embed_pb2_grpc.add_EmbedServiceServicer_to_server(embed, server)
    generate_pb2_grpc.add_GenerateServiceServicer_to_server(generate, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield module("open_loop_client").Client(channel)
    finally:
        await server.stop(None)


async def test_arrivals_do_not_wait_for_answers() -> None:
    """No call is answered before the last has come: a client that waited for one would never send the others."""
    calls = module("open_loop_client").planned({"embed": 100.0}, 0.2, random.Random(0))
    async with client_of(Embed(len(calls)), Generate()) as client:
        await client.drive(calls, 60.0)
    assert len(calls) > 9
    assert all(call.sent >= call.at for call in calls)
    answered = [call for call in calls if call.code == "OK"]
    assert {call.code for call in calls} == {"OK", "RESOURCE_EXHAUSTED"}
    assert all(call.done == call.size and call.computed == 6 and call.end >= call.sent for call in answered)
    assert min(call.end for call in answered) >= max(call.sent for call in calls)


async def test_streams_are_counted_by_tokens_and_timed_by_messages() -> None:
    calls = module("open_loop_client").planned({"generate": 100.0}, 0.1, random.Random(2))
    async with client_of(Embed(0), Generate()) as client:
        await client.drive(calls, 60.0)
    assert len(calls) > 3
    for call in calls:
        assert (call.code, call.done, call.computed) == ("OK", call.size, 12)
        assert len(call.gaps) == math.ceil(call.size / 5) - 1
        assert call.first + sum(call.gaps) == pytest.approx(call.end)


async def test_an_answer_that_lacks_a_part_ends_the_run() -> None:
    calls = module("open_loop_client").planned({"generate": 100.0}, 0.05, random.Random(2))
    async with client_of(Embed(0), Generate(short=1)) as client:
        with pytest.raises(RuntimeError, match="generate: "):
            await client.drive(calls, 60.0)


def test_a_seed_gives_the_same_requests() -> None:
    """But for their numbers, which keep a prefix cache from knowing them."""
    client = module("open_loop_client")
    one, other = (client.planned({"embed": 20.0, "rerank": 20.0}, 1.0, random.Random(5)) for _ in range(2))
    assert [(c.task, c.at, c.body, c.size) for c in one] == [(c.task, c.at, c.body, c.size) for c in other]
    assert [call.at for call in one] == sorted(call.at for call in one)
    assert all(1 <= call.size <= 32 for call in one)
