"""What both clients make of embeddings: kinds, streams of any length, calls that outlive their client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import grpc
import numpy as np
import pytest

from pyruntime.client import ApiError, AsyncClient, Client, bulk
from pyruntime.types import Capability, EmbeddingKind
from pyruntime.v1 import common_pb2, embed_pb2, generate_pb2
from tests.fakes import BOS, play, vector_of
from tests.service.conftest import Stack
from tests.service.embed_help import WIDTH, fake_values, serve

ABC = [BOS, *b"abc"]


@pytest.fixture
def kinds(stack: Stack) -> Stack:
    serve(stack, "kinds", {Capability.EMBED, Capability.SPARSE_EMBED}, embedding_kinds=frozenset(EmbeddingKind))
    return stack


def check_kinds(sparse, per_token, narrow) -> None:
    expected = fake_values(ABC, EmbeddingKind.SPARSE)
    assert (sparse[0].ids.dtype, sparse[0].weights.dtype) == (np.int64, np.float32)
    np.testing.assert_array_equal(sparse[0].ids, expected.ids)
    np.testing.assert_array_equal(sparse[0].weights, expected.weights)
    assert [each.shape for each in per_token] == [(4, WIDTH), (2, WIDTH)]
    assert per_token[0].dtype == np.float32
    np.testing.assert_array_equal(per_token[0], fake_values(ABC, EmbeddingKind.PER_TOKEN))
    np.testing.assert_array_equal(narrow[0], fake_values(ABC, EmbeddingKind.PER_TOKEN, 2))


async def test_kinds(kinds: Stack):
    texts = ["abc", "d"]

    def work() -> None:
        with Client(kinds.address, model="kinds") as client:
            narrow = client.embed(texts, kind="per_token", dimensions=2)
            check_kinds(client.embed(texts, kind="sparse"), client.embed(texts, kind="per_token"), narrow)
            assert client.embed(texts).shape == (2, 12)
            assert client.embed(texts, kind="DENSE").shape == (2, 12)
            for writable in (narrow[0], next(client.embed_stream(texts))):
                writable *= 2
            with pytest.raises(ValueError, match=r"kind: str 'wide' is not allowed; allowed: 'dense', "):
                client.embed(texts, kind="wide")

    await asyncio.to_thread(work)
    async with AsyncClient(kinds.address, model="kinds") as client:
        narrow = await client.embed(texts, kind="per_token", dimensions=2)
        check_kinds(await client.embed(texts, kind="sparse"), await client.embed(texts, kind="per_token"), narrow)
        streamed = [each async for each in client.embed_stream(texts, kind="sparse")]
        np.testing.assert_array_equal(streamed[0].weights, fake_values(ABC, EmbeddingKind.SPARSE).weights)


async def results(stack: Stack, kind: type, inputs, **options) -> list:
    """All of ``embed_stream`` of either client."""
    if kind is AsyncClient:
        async with AsyncClient(stack.address, model="decoder") as client:
            return [each async for each in client.embed_stream(inputs, **options)]

    def work() -> list:
        with Client(stack.address, model="decoder") as client:
            return list(client.embed_stream(inputs, **options))

    return await asyncio.to_thread(work)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize("count", [0, 1, 7, 8, 100])
async def test_streams_of_any_length_keep_their_order(stack: Stack, kind, count):
    texts = [f"text {place}" for place in range(count)]
    got = await results(stack, kind, iter(texts), batch_size=7, dimensions=3)
    expected = [vector_of([BOS, *text.encode()], 3) for text in texts]
    assert [each.tolist() for each in got] == [each.tolist() for each in expected]


@pytest.mark.parametrize("kind", [Client, AsyncClient])
async def test_inputs_are_taken_as_the_stream_goes(stack: Stack, kind):
    """An endless source: what was taken is never far ahead of what came out, and leaving ends the server's work."""
    taken = 0

    def endless() -> Iterator[str]:
        nonlocal taken
        while True:
            taken += 1
            yield f"text {taken}"

    def work() -> None:
        with Client(stack.address, model="decoder") as client:
            check = client.embed_stream(endless(), batch_size=2)
            for place, _ in zip(range(200), check, strict=False):
                assert taken <= place + 2 * (bulk.IN_FLIGHT + 1)
            check.close()

    if kind is Client:
        await asyncio.to_thread(work)
    else:
        async with AsyncClient(stack.address, model="decoder") as client:
            stream = client.embed_stream(endless(), batch_size=2)
            for place in range(200):
                await anext(stream)
                assert taken <= place + 2 * (bulk.IN_FLIGHT + 1)
            await stream.aclose()
    for _ in range(500):
        if stack.server.num_running == 0:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the stream is still open")


async def test_asynchronous_inputs(stack: Stack):
    async def texts() -> AsyncIterator[str]:
        for place in range(5):
            yield str(place)

    got = await results(stack, AsyncClient, texts(), batch_size=2)
    assert [each.tolist() for each in got] == [vector_of([BOS, 48 + place], 12).tolist() for place in range(5)]


@pytest.mark.parametrize("kind", [Client, AsyncClient])
async def test_errors_of_inputs_are_raised_or_returned(stack: Stack, kind):
    inputs = ["a", " ", "", "b"]
    with pytest.raises(ApiError) as caught:
        await results(stack, kind, inputs, batch_size=2)
    assert caught.value.violations[0].field == "inputs[1].text"
    got = await results(stack, kind, inputs, batch_size=2, return_errors=True)
    assert [isinstance(each, ApiError) for each in got] == [False, True, True, False]
    assert got[2].violations[0].field == "inputs[2].text"


@pytest.mark.parametrize("kind", [Client, AsyncClient])
async def test_what_ends_a_stream_is_raised(stack: Stack, kind):
    stack.engine.block = True  # else an answer might come before grpc looks at the clock
    for inputs, options, code in (
        (["a"] * 8, {"model": "unknown"}, "NOT_FOUND"),
        (iter(["a"] * 100), {"dimensions": 99, "batch_size": 1}, "INVALID_ARGUMENT"),
        (["a"], {"timeout_s": 0}, "DEADLINE_EXCEEDED"),
    ):
        with pytest.raises(ApiError) as caught:
            await results(stack, kind, inputs, **options)
        assert caught.value.code == code
    for inputs, options, error in (("abc", {}, TypeError), (["a"], {"batch_size": 0}, ValueError)):
        with pytest.raises(error):
            await results(stack, kind, inputs, **options)

    for wrong in (b"abc", {5: 6}, 5, None):
        with pytest.raises(TypeError, match="must be a list of token ids"):
            await results(stack, kind, ["a", wrong])

    def torn() -> Iterator[str]:
        yield "a"
        raise OSError("the file is torn")

    with pytest.raises(OSError, match="torn"):
        await results(stack, kind, torn(), batch_size=1)


async def test_closing_the_async_client_ends_calls_of_its_stubs(stack: Stack):
    stack.engine.next_stream = play("abcdef")
    stack.engine.next_stream.hold = 2
    client = AsyncClient(stack.address, model="decoder")
    streamed = client.generate_stub.GenerateStream(generate_pb2.GenerateRequest(model="decoder", text="hi"))
    assert (await streamed.read()).text == "a"
    stack.engine.block = True
    request = embed_pb2.EmbedRequest(model="decoder", inputs=[common_pb2.Input(text="a")])
    unary, idle = client.embed_stub.Embed(request), client.embed_stub.EmbedStream()
    await asyncio.wait_for(stack.engine.blocked.wait(), 5)
    await client.close()
    await asyncio.wait_for(stack.engine.unblocked.wait(), 5)
    await asyncio.wait_for(stack.engine.streams[0].stopped.wait(), 5)
    assert [call.cancelled() for call in (streamed, unary, idle)] == [True] * 3
    assert await unary.code() is grpc.StatusCode.CANCELLED
