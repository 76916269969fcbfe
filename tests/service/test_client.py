"""Both Python clients, against the real server."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

from pyruntime.client import ApiError, AsyncClient, Client, messages
from pyruntime.types import PoolingType
from pyruntime.v1 import generate_pb2
from tests.fakes import BOS, FakeStream, play, vector_of
from tests.service.conftest import Stack


async def test_sync_client(stack: Stack):
    def work() -> None:
        with Client(stack.address, model="decoder") as client:
            assert client.generate("hi", max_new_tokens=4, temperature=0, stop=["x"]) == "ok"
            assert list(client.stream([3, 4])) == ["o", "k"]
            assert client.complete([{"role": "user", "content": "yo"}], n=2).completions[1].text == "ok"
            vectors = client.embed(["a", [5, 6]], pooling="cls", dimensions=4, truncation="right")
            expected = np.stack([vector_of([BOS, *b"a"], 4), vector_of([5, 6], 4)])
            assert vectors.dtype == np.float32
            np.testing.assert_array_equal(vectors, expected)
            assert client.score("q", ["a", "b", "c"], ["y", "n"], apply_softmax=True).shape == (3, 2)
            assert client.score("q", ["a"], [1, 2, 3]).shape == (1, 3)
            assert client.score("q", ["a"], [1], timeout_s=float("inf")).shape == (1, 1)
            assert [model.name for model in client.models()] == ["decoder", "encoder"]
            assert list(client.tokenize("a", special_tokens=False).token_ids) == [97]
            assert client.detokenize([97, 98]) == "ab"
            with pytest.raises(TypeError, match="temprature"):
                client.generate("hi", temprature=1)
            with pytest.raises(ApiError) as caught:
                client.embed(["a", " "])  # one bad input of two
            assert (caught.value.code, caught.value.violations[0].field) == ("INVALID_ARGUMENT", "inputs[1].text")

    await asyncio.to_thread(work)
    first, second, third = stack.engine.generated
    assert (first.sampling.temperature, first.stop.max_new_tokens) == (0, 4)
    assert (second.prompt, third.n) == ([3, 4], 2)
    assert stack.engine.embedded[0].pooling is PoolingType.CLS


async def test_async_client(stack: Stack):
    async with AsyncClient(stack.address, model="decoder") as client:
        assert await client.generate("hi") == "ok"
        assert [text async for text in client.stream("hi")] == ["o", "k"]
        np.testing.assert_array_equal(await client.embed(["a"]), [vector_of([BOS, *b"a"], 12)])
        assert (await client.score("q", ["a", "b"], ["y"])).shape == (2, 1)
        assert len(await client.models()) == 2
        assert list((await client.tokenize("a")).token_ids) == [BOS, 97]
        assert await client.detokenize([97]) == "a"
        with pytest.raises(ApiError) as caught:
            await client.generate("hi", top_p=2)
        error = caught.value
        assert (error.code, error.reason) == ("INVALID_ARGUMENT", "INVALID_FIELD")
        assert error.violations[0].field == "sampling.top_p"


async def test_leaving_a_stream_early_stops_the_server(stack: Stack):
    stream = play("abcdef")
    stream.hold = 2
    stack.engine.next_stream = stream
    async with AsyncClient(stack.address) as client:
        texts = client.stream("hi")
        assert await anext(texts) == "a"
        await texts.aclose()
        await asyncio.wait_for(stream.stopped.wait(), 5)


async def test_closing_the_async_client_ends_its_open_calls(stack: Stack):
    stream = play("abcdef")
    stream.hold = 2
    stack.engine.next_stream = stream
    client = AsyncClient(stack.address, model="decoder")
    texts = client.stream("hi")
    assert await anext(texts) == "a"
    stack.engine.block = True
    waiting = asyncio.create_task(client.embed(["a"]))
    await asyncio.wait_for(stack.engine.blocked.wait(), 5)
    await client.close()
    await asyncio.wait_for(stream.stopped.wait(), 5)
    await asyncio.wait_for(stack.engine.unblocked.wait(), 5)
    for call in (anext(texts), waiting):
        with pytest.raises(ApiError) as caught:  # not CancelledError: nobody cancelled this task
            await asyncio.wait_for(call, 5)
        assert caught.value.code == "CANCELLED"


async def test_cancelling_a_task_is_not_an_api_error(stack: Stack):
    stack.engine.block = True
    async with AsyncClient(stack.address, model="decoder") as client:
        task = asyncio.create_task(client.embed(["a"]))
        await asyncio.wait_for(stack.engine.blocked.wait(), 5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await asyncio.wait_for(stack.engine.unblocked.wait(), 5)


async def test_an_event_loop_that_is_not_the_client_s_is_a_clear_error(stack: Stack):
    async with AsyncClient(stack.address, model="decoder") as client:
        for work in (client.models, lambda: client.embed_many(["a"]), lambda: anext(client.stream("hi"))):
            with pytest.raises(RuntimeError, match="made in another event loop"):
                await asyncio.to_thread(lambda work=work: asyncio.run(_awaited(work())))
    with pytest.raises(RuntimeError, match="inside the event loop that uses it"):
        await asyncio.to_thread(AsyncClient)


async def _awaited(given):
    return await given


async def test_closing_the_sync_client_ends_its_open_streams(stack: Stack):
    stream = play("abcdef")
    stream.hold = 2
    stack.engine.next_stream = stream
    client = Client(stack.address)
    texts = client.stream("hi")
    assert await asyncio.to_thread(next, texts) == "a"
    await asyncio.to_thread(client.close)
    await asyncio.wait_for(stream.stopped.wait(), 5)


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: messages.embed_request("hello", "m", {}), "inputs must be a list, not str 'hello'"),
        (lambda: messages.embed_request(b"hello", "m", {}), "inputs must be a list, not bytes"),
        (lambda: messages.embed_request([1, 2], "m", {}), "must be a list of token ids, not int 1"),
        (lambda: messages.embed_request([np.array([1.5])], "m", {}), "must be a list of token ids, not ndarray"),
        (lambda: messages.score_request("q", "abc", ["y"], "m", {}), "items must be a list, not str 'abc'"),
        (lambda: messages.score_request("q", ["a"], " yes", "m", {}), "labels must be a list, not str ' yes'"),
        (lambda: messages.score_request("q", ["a"], 5, "m", {}), "labels must be a list, not int 5"),
        (lambda: messages.score_request("q", ["a"], ["y", 5], "m", {}), "labels that are not all texts"),
        (lambda: messages.generate_request(["a", "b"], "m", {}), "a prompt that is neither text nor messages"),
        (lambda: messages.generate_request("a", "m", {"stop_token_ids": 5}), "stop_token_ids must be a list"),
        (lambda: messages.detokenize_request("12", "m"), "token_ids must be a list of token ids, not str '12'"),
    ],
)
def test_a_single_value_where_a_list_belongs_is_a_clear_error(build, says: str):
    with pytest.raises(TypeError) as caught:
        build()
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"json_schema": {"type": "null"}}, {"json_schema": '{"type": "null"}'}),
        ({"json_schema": "{}"}, {"json_schema": "{}"}),
        ({"regex": "a+"}, {"regex": "a+"}),
        ({"grammar": 'start: "a"'}, {"grammar": 'start: "a"'}),
        ({"choice": ("a", "b")}, {"choice": {"options": ["a", "b"]}}),
    ],
)
def test_a_constraint_is_an_option(options, expected):
    assert messages.generate_request("x", "m", options).constraint == generate_pb2.Constraint(**expected)


def test_constraints_exclude_each_other():
    with pytest.raises(TypeError, match="one of grammar, regex at a time"):
        messages.generate_request("x", "m", {"regex": "a", "grammar": "b"})
    with pytest.raises(TypeError, match="a list of texts"):
        messages.generate_request("x", "m", {"choice": "yes"})


def test_one_stop_string_is_taken_as_one():
    request = messages.generate_request("a", "m", {"stop": "the"})
    assert list(request.stop.strings) == ["the"]
    assert list(messages.generate_request("a", "m", {"stop": ["x", "y"]}).stop.strings) == ["x", "y"]


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint32])
def test_numpy_ids_wherever_ids_are_taken(kind):
    ids = np.array([2, 5], kind)
    assert list(messages.generate_request(ids, "m", {"stop_token_ids": ids}).token_ids.ids) == [2, 5]
    assert list(messages.generate_request((2, 5), "m", {"stop_token_ids": ids}).stop.token_ids) == [2, 5]
    assert [list(each.token_ids.ids) for each in messages.embed_request([ids], "m", {}).inputs] == [[2, 5]]
    assert len(messages.embed_request(np.array([[1, 2], [3, 4]], kind), "m", {}).inputs) == 2
    request = messages.score_request(ids, [ids], ids, "m", {})
    assert (list(request.query.token_ids.ids), list(request.items[0].token_ids.ids)) == ([2, 5], [2, 5])
    assert list(request.label_token_ids) == [2, 5]
    assert list(messages.detokenize_request(ids, "m").token_ids) == [2, 5]


async def test_a_timeout_of_zero_is_no_default(stack: Stack):
    def work(client: Client, call: str, *arguments) -> None:
        with pytest.raises(ApiError) as caught:
            list(getattr(client, call)(*arguments, timeout_s=0))
        assert caught.value.code == "DEADLINE_EXCEEDED"

    stack.engine.block = True
    stack.engine.generate = lambda request, **_: FakeStream([[]], hold=0)  # type: ignore[method-assign]
    began = time.monotonic()
    with Client(stack.address, model="decoder", timeout_s=5) as client:
        for call in (("generate", "a"), ("stream", "a"), ("embed", ["a"]), ("score", "q", ["a"], ["y"])):
            await asyncio.to_thread(work, client, *call)
    async with AsyncClient(stack.address, model="decoder", timeout_s=5) as asynchronous:
        with pytest.raises(ApiError) as caught:
            await asynchronous.embed(["a"], timeout_s=0)
        assert caught.value.code == "DEADLINE_EXCEEDED"
    assert time.monotonic() - began < 4
