"""Rerank and classify of both clients and of the console script, against the real server over fake engines."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest

from pyruntime.client import ApiError, AsyncClient, Client, cli, console, ranking
from pyruntime.client.ranking import ClassifiedToken, RankedDocument
from pyruntime.service.examples import example_requests
from pyruntime.types import Capability
from tests.fakes import BOS, EOS, fake_model, vector_of
from tests.service.conftest import Stack
from tests.service.rankers import classifier, serve, template_ranker

LABELS = ("bad", "fair", "good")
DOCUMENTS = ["a", "bc", "d", "ef", "g"]


@pytest.fixture
async def served(stack: Stack) -> Stack:
    serve(stack, classifier("cross", "relevant"), classifier("mood", *LABELS), template_ranker("prompt"))
    serve(stack, classifier("names", "O", "B", classifies_tokens=True))
    return stack


def raw(document: str) -> float:
    return float(vector_of([BOS, *b"qq", EOS, *document.encode(), EOS], 1)[0])


async def test_both_clients_rank(served: Stack):
    expected = sorted(range(5), key=lambda index: -raw(DOCUMENTS[index]))
    options = {"model": "cross", "raw_scores": True, "return_documents": True, "top_n": 4, "truncation": "right"}

    def ask() -> list[RankedDocument]:
        with Client(served.address) as client:
            with pytest.raises(ApiError, match=r"documents\[1\]: is empty"):
                client.rerank("qq", ["a", ""], model="cross")
            return client.rerank("qq", DOCUMENTS, **options)

    found = await asyncio.to_thread(ask)
    assert found == [RankedDocument(index, raw(DOCUMENTS[index]), DOCUMENTS[index]) for index in expected[:4]]
    async with AsyncClient(served.address, model="cross") as client:
        assert await client.rerank("qq", DOCUMENTS, **options) == found
        plain = await client.rerank("qq", iter(DOCUMENTS))
        assert [(each.index, each.document) for each in plain] == [(index, None) for index in expected]


async def test_both_clients_classify(served: Stack):
    logits = dict(zip(LABELS, vector_of([BOS, *b"a", EOS], 3).tolist(), strict=True))

    def ask() -> list[ranking.Classes]:
        with Client(served.address, model="mood") as client:
            with pytest.raises(ApiError, match=r"inputs\[1\]\.text: is empty"):
                client.classify(["a", ""])
            return client.classify(["a", (5, 6)], raw_scores=True)

    found = await asyncio.to_thread(ask)
    assert found[0] == logits
    assert list(found[0]) == sorted(LABELS, key=lambda label: -logits[label])
    async with AsyncClient(served.address) as client:
        assert await client.classify(["a", (5, 6)], model="mood", raw_scores=True) == found
        await client.classify([("a", "b"), ("a", [7])], model="mood", top_k=1)
        (tokens,) = await client.classify(["a"], model="names", top_k=1, raw_scores=True)
    asked = served.registry.resolve("mood", None).engine.classified  # type: ignore[attr-defined]
    assert asked[-2].inputs == [[BOS, *b"a", EOS], [5, 6]]
    assert asked[-1].inputs == [[BOS, *b"a", EOS, *b"b", EOS], [BOS, *b"a", EOS, 7, EOS]]
    first = vector_of([BOS], 2)
    assert tokens[0] == ClassifiedToken(BOS, "<s>", {"OB"[first.argmax()]: float(first.max())})
    with pytest.raises(TypeError, match="all texts or all pairs"):
        ranking.classify_request(["a", ("a", "b")], "", {})
    with pytest.raises(TypeError, match="must be a list"):
        ranking.rerank_request("q", "document", "", {})


async def lines(served: Stack, capsys, *arguments: str, status: int = 0) -> list[str]:
    assert await asyncio.to_thread(cli.main, [arguments[0], "--target", served.address, *arguments[1:]]) == status
    return capsys.readouterr().out.splitlines()


async def test_the_console_ranks_in_parts(served: Stack, capsys, monkeypatch):
    monkeypatch.setattr(console, "CHUNK", 2)
    documents = ["a", "bc", "", " ", "d"]
    expected = sorted((0, 1, 4), key=lambda index: -raw(documents[index]))
    command = ("rerank", "--model", "cross", "--raw-scores", "--json", "qq", *documents)
    records = [json.loads(line) for line in await lines(served, capsys, *command, status=1)]
    assert [each["index"] for each in records] == [*expected, 2, 3]
    assert [each["score"] for each in records[:3]] == [raw(documents[index]) for index in expected]
    assert {each["error"]["code"] for each in records[3:]} == {"INVALID_ARGUMENT"}
    (line,) = await lines(served, capsys, "rerank", "--model", "cross", "--top-n", "1", "qq", *DOCUMENTS)
    assert line.endswith(max(DOCUMENTS, key=raw))
    await lines(served, capsys, "rerank", "--model", "prompt", "--instruction", "find it", "qq", "a")
    asked = served.registry.resolve("prompt", None).engine.scored  # type: ignore[attr-defined]
    assert bytes(asked[-1].prefix[1:]) == b"S\nfind it|qq\n"
    with pytest.raises(SystemExit):
        cli.main(["rerank", "--top-n", "0", "q", "a"])
    assert "allowed: 1 or more" in capsys.readouterr().err


async def test_labels_of_the_models_own(served: Stack, capsys):
    serve(served, fake_model("head", {Capability.CLASSIFY, Capability.SCORE}, labels=LABELS))
    expected = vector_of([BOS, *b"qqa"], 3)
    async with AsyncClient(served.address) as client:
        np.testing.assert_array_equal(await client.score("qq", ["a"], model="head"), [expected])
    (line,) = await lines(served, capsys, "score", "--model", "head", "--json", "qq", "a")
    assert json.loads(line)["scores"] == dict(zip(LABELS, expected.tolist(), strict=True))
    assert await lines(served, capsys, "score", "qq", "a", "--model", "decoder", status=1) == []
    served_model = served.registry.resolve("head", None)
    assert all("labels" not in call for _, call in example_requests([served_model]))


async def test_the_console_classifies(served: Stack, capsys, monkeypatch):
    monkeypatch.setattr(console, "CHUNK", 2)
    command = ("classify", "--model", "mood", "--top-k", "2", "--json")
    records = [json.loads(line) for line in await lines(served, capsys, *command, "a", "b", "", "c", status=1)]
    assert [(each["index"], len(each.get("scores", ""))) for each in records] == [(0, 2), (1, 2), (2, 0), (3, 2)]
    await lines(served, capsys, *command, "--first", "x", "--truncation", "right", "y" * 90)
    asked = served.registry.resolve("mood", None).engine.classified  # type: ignore[attr-defined]
    assert asked[-1].inputs == [[BOS, *b"x", EOS, *b"y" * 60, EOS]]
    (line,) = await lines(served, capsys, "classify", "--model", "names", "ab")
    assert [part.rsplit("/", 1)[0] for part in line.split("  ")] == ["<s>", "a", "b", "</s>"]
