"""Both Python clients and the console script, against the real server."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest

from pyruntime.client import ApiError, AsyncClient, Client, cli
from pyruntime.types import PoolingType
from tests.fakes import BOS, play, vector_of
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


async def run(stack: Stack, *arguments: str) -> int:
    return await asyncio.to_thread(cli.main, [arguments[0], "--target", stack.address, *arguments[1:]])


async def test_console_script(stack: Stack, capsys):
    async def lines(*arguments: str) -> list:
        assert await run(stack, *arguments) == 0
        return capsys.readouterr().out.splitlines()

    assert await lines("generate", "--max-new-tokens", "9", "hi", "there") == ["ok"]
    assert (
        json.loads((await lines("generate", "--max-new-tokens", "9", "--json", "hi"))[0])["finish_reason"] == "LENGTH"
    )
    assert [line.split(":")[0] for line in await lines("models")] == ["decoder", "encoder"]
    (line,) = await lines("embed", "--model", "decoder", "--json", "a")
    np.testing.assert_array_equal(np.float32(json.loads(line)["embedding"]), vector_of([BOS, *b"a"], 12))
    scored = [
        json.loads(line) for line in await lines("score", "--json", "--label", "y", "--label", "n", "q", "a", "b")
    ]
    assert [(each["item"], sorted(each["scores"])) for each in scored] == [("a", ["n", "y"]), ("b", ["n", "y"])]
    assert await lines("tokenize", "--model", "decoder", "a") == ["256:<s> 97:a"]
    assert await lines("score", "--label", "y", "q", "a") != []


async def test_console_script_shows_what_the_server_says(stack: Stack, capsys):
    for arguments in (("rerank", "q", "d"), ("classify", "t")):
        assert await run(stack, *arguments) == 1
        assert "UNIMPLEMENTED" in capsys.readouterr().err
    assert await run(stack, "generate", "--max-new-tokens", "9", "--top-p", "2", "hi") == 1
    assert "sampling.top_p: 2 is out of range" in capsys.readouterr().err
    assert await run(stack, "generate", "--max-new-tokens", "-1", "hi") == 2


async def test_many_lines_from_standard_input_go_in_parts_with_progress(stack: Stack, capsys, monkeypatch):
    monkeypatch.setattr(cli, "CHUNK", 4)
    monkeypatch.setattr(cli, "PROGRESS_FROM", 8)
    monkeypatch.setattr("sys.stdin", __import__("io").StringIO("".join(f"text {i}\n" for i in range(10))))
    assert await run(stack, "embed", "--model", "decoder", "--json") == 0
    captured = capsys.readouterr()
    assert [json.loads(line)["index"] for line in captured.out.splitlines()] == list(range(10))
    assert [len(job.inputs) for job in stack.engine.embedded] == [4, 4, 2]
    assert "10/10" in captured.err
