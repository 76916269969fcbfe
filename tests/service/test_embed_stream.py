"""EmbedStream: order, bounds, backpressure, what ends it and what does not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import grpc
import numpy as np
import pytest
from google.rpc import status_pb2

from pyruntime.errors import ComputeFault, Overloaded
from pyruntime.service.embed_stream import MAX_IN_FLIGHT, in_order
from pyruntime.types import Capability, EmbeddingKind, EmbedRequest
from pyruntime.v1 import common_pb2, embed_pb2
from tests.fakes import BOS, POISON, vector_of
from tests.service.conftest import SETTINGS, Failure, Stack, unpack
from tests.service.embed_help import serve

Code = grpc.StatusCode
Ids = common_pb2.TokenIds
Input = common_pb2.Input


def request(*texts: str, **fields) -> embed_pb2.EmbedRequest:
    inputs = [Input(text=text) for text in texts]
    return embed_pb2.EmbedRequest(**{"model": "decoder", "inputs": inputs} | fields)


async def ended(call: grpc.aio.StreamStreamCall) -> tuple[list[embed_pb2.EmbedResponse], Failure | None]:
    """The responses until the stream ends, and the error that ended it."""
    responses = []
    try:
        while (response := await call.read()) is not grpc.aio.EOF:
            responses.append(response)
    except grpc.aio.AioRpcError as error:
        failure = unpack(status_pb2.Status.FromString(dict(error.trailing_metadata())["grpc-status-details-bin"]))
        assert failure.code is error.code()
        return responses, failure
    return responses, None


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not come about")


def vector(response: embed_pb2.EmbedResponse, place: int = 0) -> np.ndarray:
    return np.float32(response.results[place].dense.values)


class Gates:
    """Holds each embed of an engine until the test lets it go; ``open`` lists those inside by their first text."""

    def __init__(self, stack: Stack) -> None:
        self.waiting: dict[str, asyncio.Event] = {}
        self.most = 0
        self._embed = stack.engine.embed
        stack.engine.embed = self  # type: ignore[method-assign, assignment]

    async def __call__(self, job: EmbedRequest, *, ticket: object = None, at_once: bool = False):
        name = bytes(job.inputs[0][1:]).decode()
        self.waiting[name] = asyncio.Event()
        self.most = max(self.most, len(self.waiting))
        try:
            await self.waiting[name].wait()
            return await self._embed(job)
        finally:
            del self.waiting[name]

    async def inside(self, *names: str) -> None:
        await until(lambda: set(self.waiting) == set(names))


async def test_answers_come_in_the_order_of_the_requests(stack: Stack):
    gates = Gates(stack)
    call = stack.embed.EmbedStream(iter([request("a"), request("b", "x"), request("c", model="encoder")]))
    await gates.inside("a", "b")
    gates.waiting["b"].set()
    await gates.inside("a")
    gates.waiting["a"].set()
    responses, failure = await ended(call)
    assert failure is None
    assert [(each.model, len(each.results)) for each in responses] == [("decoder", 1), ("decoder", 2), ("encoder", 1)]
    np.testing.assert_array_equal(vector(responses[1], 1), vector_of([BOS, *b"x"], 12))
    assert [result.index for result in responses[1].results] == [0, 1]
    assert responses[1].usage.prompt_tokens == 4
    assert responses[1].timing.HasField("compute")


async def test_nothing_sent_ends_with_ok(stack: Stack):
    call = stack.embed.EmbedStream(iter([]))
    assert await ended(call) == ([], None)
    assert await call.code() is Code.OK


async def test_an_open_stream_answers_without_being_half_closed(stack: Stack):
    call = stack.embed.EmbedStream()
    for text in ("a", "b"):
        await call.write(request(text))
        np.testing.assert_array_equal(vector(await call.read()), vector_of([BOS, *text.encode()], 12))
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF


async def test_only_a_few_requests_are_in_flight(stack: Stack):
    """The first one holds up the answers to the others; of these only so many are begun."""
    gates = Gates(stack)
    names = [f"{place:02}" for place in range(3 * MAX_IN_FLIGHT)]
    call = stack.embed.EmbedStream(iter([request(name) for name in names]))
    await gates.inside(*names[:MAX_IN_FLIGHT])
    for name in names[1:MAX_IN_FLIGHT]:
        gates.waiting[name].set()
    await gates.inside(names[0])
    collected = asyncio.create_task(ended(call))
    while not collected.done():
        for gate in gates.waiting.values():
            gate.set()
        await asyncio.sleep(0)
    responses, failure = await collected
    assert failure is None
    assert [vector(each).tolist() for each in responses] == [
        vector_of([BOS, *name.encode()], 12).tolist() for name in names
    ]
    assert gates.most <= MAX_IN_FLIGHT


async def test_a_client_that_does_not_read_is_not_read_from(stack: Stack):
    """Large answers fill the connection's window; then the server takes no more requests, and all come in the end."""
    stack.server._room.settings = SETTINGS.model_copy(update={"max_inputs_per_request": 5000})
    texts, count = ["a"] * 1000, 160  # about 60 KB a response
    call = stack.embed.EmbedStream(request(str(place), *texts) for place in range(count))
    before = -1
    while before != (before := len(stack.engine.embedded)) or before == 0:  # until nothing moves any more
        await asyncio.sleep(0.25)
    assert before < 0.8 * count
    responses, failure = await ended(call)
    assert failure is None
    assert [vector(each).tolist() for each in responses] == [
        vector_of([BOS, *str(place).encode()], 12).tolist() for place in range(count)
    ]


async def test_what_is_wrong_with_inputs_leaves_the_stream(stack: Stack):
    poison = embed_pb2.EmbedRequest(model="decoder", inputs=[Input(token_ids=Ids(ids=[POISON]))])
    bad = [
        (request(" ", ""), ["INVALID_FIELD"] * 2),  # Embed would refuse all of it
        (request("a" * 1000, "b" * 1000, "c" * 1001), ["INVALID_FIELD"] * 3),  # too much in all
        (request("a" * 70, "b"), ["INVALID_FIELD", ""]),
        (poison, ["COMPUTE_FAULT"]),
        (request("x"), [""]),
    ]
    responses, failure = await ended(stack.embed.EmbedStream(iter([each for each, _ in bad])))
    assert failure is None
    for response, (_, reasons) in zip(responses, bad, strict=True):
        got = [unpack(result.error).reason if result.HasField("error") else "" for result in response.results]
        assert got == reasons
    assert "has 3001 bytes of text in all" in unpack(responses[1].results[2].error).violations["inputs"]


async def test_a_failed_computation_leaves_the_stream(stack: Stack):
    embed = stack.engine.embed

    async def failing(job: EmbedRequest, **options):
        if job.inputs[0][1:] == list(b"bad"):
            raise ComputeFault("the forward failed: MemoryError")
        return await embed(job, **options)

    stack.engine.embed = failing  # type: ignore[method-assign]
    responses, failure = await ended(stack.embed.EmbedStream(iter([request("bad", "x"), request("y")])))
    assert failure is None
    assert [unpack(result.error).reason for result in responses[0].results] == ["COMPUTE_FAULT"] * 2
    assert responses[1].results[0].HasField("dense")


async def test_a_sparse_answer_that_is_too_large_leaves_the_stream(stack: Stack):
    serve(stack, "kinds", {Capability.SPARSE_EMBED}, embedding_kinds=frozenset({EmbeddingKind.SPARSE}))
    stack.server._room.settings = SETTINGS.model_copy(update={"max_message_bytes": 300})
    requests = [
        request(text, model="kinds", kind=embed_pb2.EMBEDDING_KIND_SPARSE)
        for text in ("".join(map(chr, range(40, 103))), "a")
    ]
    responses, failure = await ended(stack.embed.EmbedStream(iter(requests)))
    assert failure is None
    assert unpack(responses[0].results[0].error).reason == "RESPONSE_TOO_LARGE"
    assert list(responses[1].results[0].sparse.token_ids) == [97, BOS]


@pytest.mark.parametrize(
    ("bad", "code", "field"),
    [
        (request("b", model="unknown"), Code.NOT_FOUND, ""),
        (request("b", prompt_name="unknown"), Code.NOT_FOUND, ""),
        (request("b", kind=embed_pb2.EMBEDDING_KIND_SPARSE), Code.FAILED_PRECONDITION, ""),
        (request("b", dimensions=99), Code.INVALID_ARGUMENT, "dimensions"),
        (request(), Code.INVALID_ARGUMENT, "inputs"),
        (request(*["b"] * 9), Code.INVALID_ARGUMENT, "inputs"),
    ],
)
async def test_what_ends_the_stream_comes_behind_the_answers_before(stack: Stack, bad, code, field):
    gates = Gates(stack)
    call = stack.embed.EmbedStream(iter([request("a"), bad, request("c")]))
    await gates.inside("a", "c")
    gates.waiting["a"].set()
    responses, failure = await ended(call)
    assert [vector(each).tolist() for each in responses] == [vector_of([BOS, 97], 12).tolist()]
    assert (failure.code, list(failure.violations)) == (code, [field] if field else [])
    await gates.inside()  # the one behind was stopped


async def test_a_client_that_goes_away_stops_all_that_is_in_flight(stack: Stack):
    gates = Gates(stack)
    call = stack.embed.EmbedStream(iter([request(name) for name in "abc"]))
    await gates.inside("a", "b", "c")
    call.cancel()
    await gates.inside()
    assert stack.engine.admission.num_open == 0
    await until(lambda: stack.server.num_running == 0)


async def test_a_deadline_ends_the_stream_and_its_work(stack: Stack):
    gates = Gates(stack)
    call = stack.embed.EmbedStream(iter([request("a")]), timeout=0.3)
    await gates.inside("a")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is Code.DEADLINE_EXCEEDED
    await gates.inside()


async def test_a_full_queue_makes_the_stream_wait(stack: Stack):
    full = Overloaded("model decoder: 1024 requests are open", retry_after_s=0.01)
    stack.engine.refusal = full
    call = stack.embed.EmbedStream()
    await call.write(request("a"))
    refused = 0

    def refuse() -> None:
        nonlocal refused
        refused += 1
        if refused == 5:
            stack.engine.refusal = None
        if stack.engine.refusal is not None:
            raise stack.engine.refusal

    stack.engine._refuse = refuse  # type: ignore[method-assign]
    np.testing.assert_array_equal(vector(await call.read()), vector_of([BOS, 97], 12))
    assert refused == 5
    call.cancel()


async def test_a_drain_lets_what_was_read_finish_and_ends_idle_streams(stack: Stack):
    gates = Gates(stack)
    idle, busy = stack.embed.EmbedStream(), stack.embed.EmbedStream()
    await idle.write(request("i"))
    await gates.inside("i")
    gates.waiting["i"].set()
    await idle.read()
    await busy.write(request("b"))
    await gates.inside("b")
    draining = asyncio.create_task(stack.server.drain(20))
    responses, failure = await ended(idle)
    assert (responses, failure.code, failure.retry_s) == ([], Code.UNAVAILABLE, 1.0)
    gates.waiting["b"].set()
    responses, failure = await ended(busy)
    assert (len(responses), failure.code) == (1, Code.UNAVAILABLE)
    await asyncio.wait_for(draining, 10)


async def test_an_error_of_the_items_comes_behind_their_results():
    async def items() -> AsyncIterator[int]:
        yield 1
        yield 2
        raise ValueError("torn")

    async def double(item: int) -> int:
        return 2 * item

    got = []
    with pytest.raises(ValueError, match="torn"):
        async for each in in_order(items(), double):
            got.append(each)
    assert got == [2, 4]
