"""The console script as a process of its own: pipes, signals, and what a newcomer does wrong."""

from __future__ import annotations

import asyncio
import io
import json
import signal
import subprocess
import sys

import pytest

from pyruntime.client import Retry, cli, console
from pyruntime.client.calls import Calls
from tests.fakes import FakeStream
from tests.service.conftest import Stack
from tests.service.secured import served
from tests.service.test_cli import give, run

SCRIPT = [sys.executable, "-m", "pyruntime.client.cli"]


async def start(stack: Stack, *arguments: str, **pipes) -> asyncio.subprocess.Process:
    given = [arguments[0], "--target", stack.address, *arguments[1:]]
    return await asyncio.create_subprocess_exec(*SCRIPT, *given, stderr=subprocess.PIPE, **pipes)


async def test_an_endless_pipe_is_answered_as_it_comes_and_left_when_the_reader_has_enough():
    async with served(max_inputs_per_request=console.CHUNK, max_request_text_bytes=10_000) as address:
        given = f"yes 'some text' | {' '.join(SCRIPT)} embed --target {address} --model decoder --json | head -n 100"
        process = await asyncio.create_subprocess_shell(given, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        out, err = await asyncio.wait_for(process.communicate(), 60)
    assert [json.loads(line)["index"] for line in out.splitlines()] == list(range(100))
    assert b"Traceback" not in err
    assert b"Error" not in err.replace(b"yes: standard output: Broken pipe", b"")


async def test_an_interrupt_stops_the_work_quietly(stack: Stack):
    streams: list[FakeStream] = []

    def generate(request, **_) -> FakeStream:
        streams.append(FakeStream([[]], hold=0))
        return streams[-1]

    stack.engine.generate = generate  # type: ignore[method-assign]
    process = await start(stack, "generate", "--max-new-tokens", "9", "hi", stdout=subprocess.PIPE)
    while not streams:
        await asyncio.sleep(0.01)
    await asyncio.wait_for(streams[0].started.wait(), 30)
    process.send_signal(signal.SIGINT)
    _, err = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 130
    assert b"Traceback" not in err
    await asyncio.wait_for(streams[0].stopped.wait(), 10)


async def test_a_proxy_is_not_asked_for_this_machine(stack: Stack):
    process = await start(stack, "models", stdout=subprocess.PIPE, env={"http_proxy": "http://127.0.0.1:1"})
    out, err = await asyncio.wait_for(process.communicate(), 30)
    assert out.decode().startswith("decoder: "), err.decode()


async def test_a_server_that_is_not_there(capsys, monkeypatch):
    monkeypatch.setattr(cli, "Retry", lambda on_wait: Retry(attempts=2, first_wait_s=0.01, on_wait=on_wait))
    assert await asyncio.to_thread(cli.main, ["models", "--target", "127.0.0.1:1"]) == 1
    err = capsys.readouterr().err
    assert "nothing could be reached at 127.0.0.1:1" in err
    assert "Traceback" not in err
    for target in ("127.0.0.1", "http://127.0.0.1:50051"):
        assert await asyncio.to_thread(cli.main, ["models", "--target", target]) == 2
        assert "HOST:PORT" in capsys.readouterr().err


async def test_a_server_that_loads_and_one_that_drains(bare: Stack, capsys, monkeypatch):
    monkeypatch.setattr(cli, "Retry", lambda on_wait: Retry(attempts=2, patience_s=2, on_wait=on_wait))
    monkeypatch.setattr(Calls, "_pause", lambda *_: None)
    bare.registry.declare("decoder")
    assert await run(bare, "generate", "--model", "decoder", "hi") == 1
    err = capsys.readouterr().err
    assert "is still loading" in err
    assert "trying again in" in err
    assert "nothing could be reached" not in err
    bare.registry.set_serving("decoder", bare.decoder)
    assert await run(bare, "generate", "--model", "other", "hi") == 1
    assert "unknown model 'other'; known: decoder" in capsys.readouterr().err
    bare.registry.drain()
    assert await run(bare, "embed", "--model", "decoder", "hi") == 1
    assert "UNAVAILABLE" in capsys.readouterr().err


async def test_something_else_at_the_address(capsys):
    import grpc

    other = grpc.aio.server()
    port = other.add_insecure_port("127.0.0.1:0")
    await other.start()
    assert await asyncio.to_thread(cli.main, ["models", "--target", f"127.0.0.1:{port}"]) == 1
    assert "is no pyruntime server" in capsys.readouterr().err
    await other.stop(0)


class Pipe(io.RawIOBase):
    """Cannot be read twice."""

    def __init__(self, content: bytes) -> None:
        self._content = io.BytesIO(content)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        return self._content.readinto(buffer)


@pytest.mark.parametrize("is_pipe", [False, True])
async def test_lines_end_at_line_feeds_alone(stack: Stack, capsys, monkeypatch, is_pipe: bool):
    content = "a\u2028b\r\n\n \nc\x0cd\x85e".encode()
    give(monkeypatch, content)
    if is_pipe:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BufferedReader(Pipe(content))))
    assert await run(stack, "embed", "--model", "decoder", "--json") == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    sent = [bytes(ids[1:]).decode() for ids in stack.engine.embedded[-1].inputs]
    assert sent == ["a\u2028b", "c\x0cd\x85e"]


async def test_bad_bytes_late_in_a_pipe_leave_what_came_before(stack: Stack, capsys, monkeypatch):
    monkeypatch.setattr(console, "CHUNK", 1)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BufferedReader(Pipe(b"a\n" * 9 + b"b\xff\nc\n"))))
    assert await run(stack, "score", "--label", "y", "q") == 2
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 9
    assert "stdin is not UTF-8: invalid start byte at byte 1 in line 10" in captured.err
    give(monkeypatch, b"a\n" * 9 + b"b\xff\nc\n")  # a file is looked through before anything is sent
    assert await run(stack, "score", "--label", "y", "q") == 2
    assert capsys.readouterr().out == ""


def test_help_says_what_a_newcomer_asks(capsys):
    for arguments in (["--help"], *([name, "--help"] for name in cli.RUNS)):
        with pytest.raises(SystemExit) as stopped:
            cli.main(arguments)
        assert stopped.value.code == 0
        shown = capsys.readouterr().out
        assert all(len(line) <= 120 for line in shown.splitlines())
        expected = (
            ("examples:", "exit status:", "PYRUNTIME_TOKEN") if len(arguments) == 1 else ("--target", "--token-file")
        )
        assert all(word in shown for word in expected)
