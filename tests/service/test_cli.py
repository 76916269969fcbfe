"""The console script, against the real server."""

from __future__ import annotations

import asyncio
import io
import json
from dataclasses import replace

import numpy as np
import pytest

from pyruntime.client import cli, console
from pyruntime.types import Capability, EmbeddingKind
from tests.fakes import BOS, vector_of
from tests.service.conftest import Stack
from tests.service.embed_help import WIDTH, fake_values, serve


async def run(stack: Stack, *arguments: str) -> int:
    return await asyncio.to_thread(cli.main, [arguments[0], "--target", stack.address, *arguments[1:]])


def give(monkeypatch, content: bytes) -> None:
    """``content`` on standard input."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content), encoding="latin-1"))


async def test_console_script(stack: Stack, capsys):
    async def lines(*arguments: str) -> list:
        assert await run(stack, *arguments) == 0
        return capsys.readouterr().out.splitlines()

    assert await lines("generate", "--max-new-tokens", "9", "hi", "there") == ["ok"]
    assert (
        json.loads((await lines("generate", "--max-new-tokens", "9", "--json", "hi"))[0])["finish_reason"] == "LENGTH"
    )
    assert [line.split(":")[0] for line in await lines("models")] == ["decoder", "encoder"]
    stack.encoder.info = replace(stack.encoder.info, dtype="bfloat16", quantization="int8")
    shown = [line.split(", ")[1] for line in await lines("models")]
    assert shown == ["float32 on cpu", "int8 and bfloat16 on cpu"]
    told = [json.loads(line) for line in await lines("models", "--json")]
    assert [(each["dtype"], each["quantization"]) for each in told] == [("float32", "none"), ("bfloat16", "int8")]
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
        assert "FAILED_PRECONDITION: no served model can" in capsys.readouterr().err
    assert await run(stack, "generate", "--max-new-tokens", "9", "--top-p", "2", "hi") == 1
    assert capsys.readouterr().err.count("sampling.top_p: 2 is out of range") == 1
    assert await run(stack, "generate", "--max-new-tokens", "-1", "hi") == 2


@pytest.mark.parametrize("timeout", ["0", "-1", "nan", "inf", "soon"])
def test_a_timeout_that_is_none_is_bad_usage(capsys, timeout):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["models", "--timeout", timeout])
    assert stopped.value.code == 2
    assert "--timeout" in capsys.readouterr().err


async def test_many_lines_from_standard_input_go_in_parts_with_progress(stack: Stack, capsys, monkeypatch):
    monkeypatch.setattr(console, "CHUNK", 4)
    monkeypatch.setattr(console, "PROGRESS_FROM", 8)
    give(monkeypatch, "".join(f"text {i}\n" for i in range(10)).encode())
    assert await run(stack, "embed", "--model", "decoder", "--json") == 0
    captured = capsys.readouterr()
    assert [json.loads(line)["index"] for line in captured.out.splitlines()] == list(range(10))
    assert [len(job.inputs) for job in stack.engine.embedded] == [4, 4, 2]
    assert "10/10" in captured.err
    give(monkeypatch, "".join(f"text {i}\n" for i in range(10)).encode())
    assert await run(stack, "embed", "--model", "decoder", "--batch-size", "5") == 0
    assert [len(job.inputs) for job in stack.engine.embedded[3:]] == [5, 5]
    give(monkeypatch, b"a\nb\nc\n")
    assert await run(stack, "score", "--label", "y", "--batch-size", "2", "q") == 0
    assert [len(job.items) for job in stack.engine.scored] == [2, 1]


@pytest.mark.parametrize("command", [["generate"], ["embed"], ["tokenize"], ["score", "--label", "y", "q"]])
@pytest.mark.parametrize("content", [b"", b"\n", b" \n\t\n"])
async def test_nothing_on_standard_input_is_bad_usage(stack: Stack, capsys, monkeypatch, command, content):
    give(monkeypatch, content)
    assert await run(stack, *command) == 2
    assert "was given, neither as an argument nor on standard input" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", None)  # closed before Python began
    assert await run(stack, *command) == 2


async def test_standard_input_is_utf8_whatever_the_locale(stack: Stack, capsys, monkeypatch):
    give(monkeypatch, "né".encode("latin-1"))
    assert await run(stack, "embed", "--model", "decoder") == 2
    assert "stdin is not UTF-8" in capsys.readouterr().err
    give(monkeypatch, "né".encode())
    assert await run(stack, "embed", "--model", "decoder") == 0
    assert stack.engine.embedded[-1].inputs == [[BOS, *"né".encode()]]
    assert await run(stack, "embed", "--model", "decoder", b"n\xe9".decode("utf-8", "surrogateescape")) == 2
    assert "an argument is not UTF-8" in capsys.readouterr().err


async def test_good_results_are_shown_beside_bad_ones(stack: Stack, capsys, monkeypatch):
    monkeypatch.setattr(console, "CHUNK", 2)
    embed = ("embed", "--model", "decoder", "--dimensions", "2")
    assert await run(stack, *embed, "a", "", "b", "c") == 1
    captured = capsys.readouterr()
    shown = [" ".join(f"{number:g}" for number in vector_of([BOS, *text], 2)) for text in (b"a", b"b", b"c")]
    assert captured.out.splitlines() == shown
    assert "text 1: INVALID_ARGUMENT: inputs[1].text: is empty" in captured.err

    assert await run(stack, *embed, "--json", "a", "", "b") == 1
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(each["index"], "embedding" in each) for each in records] == [(0, True), (1, False), (2, True)]
    assert records[1]["error"]["code"] == "INVALID_ARGUMENT"

    assert await run(stack, "score", "--label", "y", "q", "a", "", "b", "c") == 1
    captured = capsys.readouterr()
    assert [line[-1] for line in captured.out.splitlines()] == ["a", "b", "c"]
    assert "item 1: INVALID_ARGUMENT" in captured.err


async def test_a_part_without_one_good_text_leaves_the_rest(stack: Stack, capsys, monkeypatch):
    monkeypatch.setattr(console, "CHUNK", 2)
    texts = ["a", "b", "", " ", "c" * 70, "d" * 70, "e"]
    for command, unit in (("embed", "text"), ("score", "item")):
        given = ("--label", "y", "q") if command == "score" else ()
        assert await run(stack, command, "--model", "decoder", *given, *texts) == 1
        captured = capsys.readouterr()
        assert len(captured.out.splitlines()) == 3
        for place, says in ((2, "is empty"), (3, "is blank"), (4, "tokens; allowed"), (5, "tokens; allowed")):
            (line,) = [line for line in captured.err.splitlines() if line.startswith(f"pyruntime: {unit} {place}: ")]
            assert says in line
    assert await run(stack, "score", "--label", "yy", "--model", "decoder", "q", "a") == 1
    assert "labels[0]" in capsys.readouterr().err


async def test_embeddings_of_other_kinds(stack: Stack, capsys):
    serve(stack, "kinds", {Capability.EMBED, Capability.SPARSE_EMBED}, embedding_kinds=frozenset(EmbeddingKind))

    async def line(*arguments: str) -> str:
        assert await run(stack, "embed", "--model", "kinds", *arguments, "ab") == 0
        return capsys.readouterr().out.removesuffix("\n")

    assert await line("--kind", "sparse") == "97:25.25 98:25.5 256:65"
    record = {"index": 0, "token_ids": [97, 98, 256], "weights": [25.25, 25.5, 65.0]}
    assert json.loads(await line("--kind", "sparse", "--json")) == record
    assert [len(vector.split()) for vector in (await line("--kind", "per_token")).split("; ")] == [WIDTH] * 3
    vectors = json.loads(await line("--kind", "per_token", "--json"))["embeddings"]
    np.testing.assert_array_equal(np.float32(vectors), fake_values([BOS, *b"ab"], EmbeddingKind.PER_TOKEN))
