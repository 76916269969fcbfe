"""Bulk work outlives the server: what was answered is kept, what was not is sent again, everything comes once."""

from __future__ import annotations

import asyncio
import random
import threading

import numpy as np
import pytest

from pyruntime.client import ApiError, AsyncClient, Client, Retry
from pyruntime.errors import NotReady
from tests.fakes import BOS, vector_of
from tests.service.conftest import Stack
from tests.service.fake_server import process

TEXTS = [f"text {place}" for place in range(60)]
EXPECTED = np.stack([vector_of([BOS, *text.encode()], 12) for text in TEXTS])
BEFORE = 11


def test_a_killed_server_that_comes_back_on_its_port_is_no_break():
    with process() as (first, port):
        taken: list[str] = []
        address = f"127.0.0.1:{port}"
        reached, killed = threading.Event(), threading.Event()

        def texts():
            for text in TEXTS:
                taken.append(text)
                yield text

        async def asynchronous() -> list:
            got = []
            async with AsyncClient(address) as client:
                async for vector in client.embed_stream(TEXTS, batch_size=2):
                    got.append(vector)
                    if len(got) == BEFORE:
                        reached.set()
                        await asyncio.to_thread(killed.wait)
            return got

        results: list = []
        other = threading.Thread(target=lambda: results.extend(asyncio.run(asynchronous())))
        other.start()
        with Client(address) as client:
            stream = client.embed_stream(texts(), batch_size=2)
            got = [next(stream) for _ in range(BEFORE)]
            assert reached.wait(60)
            first.kill()
            first.wait()
            killed.set()
            with process(port):
                got += list(stream)
                other.join(60)
    assert not other.is_alive()
    np.testing.assert_array_equal(np.stack(got), EXPECTED)
    np.testing.assert_array_equal(np.stack(results), EXPECTED)
    assert taken == TEXTS  # each was asked of the source once


class Refusing:
    """Makes the first ``count`` calls of a stack's embedding fail."""

    def __init__(self, stack: Stack, error: Exception, count: int) -> None:
        self._answer, self._error, self._left = stack.engine.embed, error, count
        self.num_calls = 0
        stack.engine.embed = self.embed  # type: ignore[method-assign]

    async def embed(self, request, **options):
        self.num_calls += 1
        if self._left:
            self._left -= 1
            raise self._error
        return await self._answer(request, **options)


QUICK = Retry(attempts=3, first_wait_s=0.001, most_wait_s=0.002)


async def test_a_refused_part_is_asked_for_again_until_it_is_answered(stack: Stack):
    refusing = Refusing(stack, NotReady("loading", 0.0), 9)
    async with AsyncClient(stack.address, model="decoder", retry=Retry(attempts=2)) as client:
        with pytest.raises(ApiError):  # nobody knows yet that there is a server behind the address
            await client.embed_many(TEXTS[:6], batch_size=2)
        await client.models()
        got = await client.embed_many(TEXTS[:6], batch_size=2)
    np.testing.assert_array_equal(got, EXPECTED[:6])
    assert refusing.num_calls > 6


@pytest.mark.parametrize("kind", [Client, AsyncClient])
async def test_breaks_anywhere_lose_and_repeat_nothing(stack: Stack, kind):
    draw, answer = random.Random(7), stack.engine.embed
    num_broken = 0

    async def embed(request, **options):
        nonlocal num_broken
        if draw.random() < 0.4:
            num_broken += 1
            raise NotReady("draining", 0.0)
        return await answer(request, **options)

    stack.engine.embed = embed  # type: ignore[method-assign]
    quick = Retry(first_wait_s=0.0, most_wait_s=0.0)

    def work() -> object:
        with Client(stack.address, model="decoder", retry=quick) as client:
            return client.embed_many(TEXTS, batch_size=3)

    if kind is Client:
        got = await asyncio.to_thread(work)
    else:
        async with AsyncClient(stack.address, model="decoder", retry=quick) as client:
            got = await client.embed_many(TEXTS, batch_size=3)
    np.testing.assert_array_equal(got, EXPECTED)
    assert num_broken > 5


@pytest.mark.parametrize("kind", [Client, AsyncClient])
async def test_many_inputs_through_the_unary_methods(stack: Stack, kind, capsys):
    items = ["a", "bb", "ccc", "dddd", "e"]
    progress = {"batch_size": 2, "progress": True}

    def work() -> list:
        with Client(stack.address, model="decoder") as client:
            return [
                client.score_many("q", items, ["y", "n"], **progress),
                client.score("q", items, ["y", "n"]),
                client.score_many("q", [], ["y", "n"]),
                client.embed_many([], batch_size=2),
            ]

    if kind is Client:
        many, whole, none, nothing = await asyncio.to_thread(work)
    else:
        async with AsyncClient(stack.address, model="decoder") as client:
            many = await client.score_many("q", items, ["y", "n"], **progress)
            whole = await client.score("q", items, ["y", "n"])
            none = await client.score_many("q", [], ["y", "n"])
            nothing = await client.embed_many([], batch_size=2)
    np.testing.assert_array_equal(many, whole)
    assert (none.shape, nothing) == ((0, 2), [])
    assert "5/5" in capsys.readouterr().err


async def test_an_error_says_which_of_all_inputs_it_was(stack: Stack):
    async with AsyncClient(stack.address, model="decoder") as client:
        with pytest.raises(ApiError) as caught:
            await client.score_many("q", ["a", "b", "c", " "], ["y"], batch_size=2)
        assert caught.value.violations[0].field == "items[3].text"
        assert str(caught.value).startswith("INVALID_ARGUMENT: items[3].text: is blank")
        texts = ["a", "b", "c", " ", "d"]
        with pytest.raises(ApiError, match=r"inputs\[3\].text: is blank"):
            await client.embed_many(texts, batch_size=2)
        found = [each async for each in client.embed_stream(texts, batch_size=2, return_errors=True)]
        assert found[3].violations[0].field == "inputs[3].text"
        for kind in (TypeError, ValueError):  # found before anything is sent
            with pytest.raises(kind) as local:
                await client.embed_many(["a", "b", "c", None if kind is TypeError else [-1]], batch_size=2)
            assert local.value.__notes__ == ["in the part that begins with input 2, which is number 0 there"]


async def test_an_error_of_the_source_is_not_taken_for_one_of_the_call(stack: Stack):
    """Inputs may come from another client's stream."""

    def torn():
        yield "a"
        raise ApiError("UNAVAILABLE", "the other server")

    async with AsyncClient(stack.address, model="decoder", retry=QUICK) as client:
        with pytest.raises(ApiError, match="the other server"):
            [each async for each in client.embed_stream(torn(), batch_size=1)]


async def test_patience_ends(stack: Stack):
    address = stack.address
    await stack.server.drain(0)
    impatient = Retry(first_wait_s=0.001, most_wait_s=0.01, patience_s=0.1)
    async with AsyncClient(address, model="decoder", retry=impatient) as client:
        with pytest.raises(ApiError) as caught:
            await client.embed_many(["a"])
    assert caught.value.code == "UNAVAILABLE"
    with Client(address, model="decoder", retry=impatient) as blocking, pytest.raises(ApiError):
        await asyncio.to_thread(list, blocking.embed_stream(["a"]))
