"""The whole program with JSON logs: every line of it, from its start to its end, and its last spans."""

from __future__ import annotations

import json
import logging
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

import server
from pyruntime.telemetry.logs import JsonFormatter, Seldom, TextFormatter, stack_of
from pyruntime.v1 import embed_pb2, embed_pb2_grpc
from tests.service.call_site import Collector

PROGRAM = """
import sys, threading, types, warnings

def load_served_model(name, path, settings, progress, num_sharing):
    from tests.fakes import fake_model
    from pyruntime.types import Capability
    warnings.warn("a warning of a library")
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()
    return fake_model(name, {Capability.EMBED})

sys.modules["pyruntime.serving"] = types.SimpleNamespace(load_served_model=load_served_model)
import server
sys.argv = ["server.py", "--model", "m=/nowhere", *sys.argv[1:]]
sys.exit(server.main())
"""
REQUEST = embed_pb2.EmbedRequest(inputs=[{"text": "some words"}])


class Program:
    """The server in a process of its own. ``lines``: its log, once it has ended."""

    def __init__(self, folder: Path, *options: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{probe.getsockname()[1]}"
        self._err = (folder / "stderr").open("w+")
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, "--port", self.address.rpartition(":")[2], *options],
            cwd=Path(server.__file__).parent,
            stdout=subprocess.PIPE,
            stderr=self._err,
            text=True,
        )
        self.lines: list[dict[str, Any]] = []

    def embed(self, **options: Any) -> None:
        with grpc.insecure_channel(self.address) as channel:
            embed_pb2_grpc.EmbedServiceStub(channel).Embed(REQUEST, wait_for_ready=True, timeout=30, **options)

    def end(self) -> tuple[int, str]:
        """Exit status and standard output."""
        self._process.send_signal(signal.SIGTERM)
        out, _ = self._process.communicate(timeout=30)
        self._err.seek(0)
        self.lines = [json.loads(line) for line in self._err.read().splitlines()]
        return self._process.returncode, out

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._err.close()
        if self._process.stdout is not None:
            self._process.stdout.close()


def ready(program: Program) -> None:
    """Once its model serves, an embedding is answered; until then calls are refused."""
    for _ in range(600):
        try:
            program.embed()
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            time.sleep(0.05)
        else:
            return
    raise AssertionError("it does not serve")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path


def test_every_line_is_json_and_the_last_spans_are_sent_at_the_end(folder: Path):
    with Collector() as collector:
        program = Program(folder, "--log-format", "json", "--otlp-endpoint", collector.endpoint)
        try:
            ready(program)
            program.embed(metadata=(("x-request-id", "the-last"),))
            assert program.end() == (0, "")
        finally:
            program.kill()
        by_message = {line["message"]: line for line in program.lines}
        assert by_message["model m is ready"]["logger"] == "pyruntime.server"
        assert any(message.startswith("SERVING on") for message in by_message)
        assert by_message["uncaught exception"]["stack"].endswith("ZeroDivisionError: division by zero")
        assert any("a warning of a library" in message for message in by_message)
        call = next(line for line in program.lines if line.get("request_id") == "the-last")
        assert {"time", "level", "logger", "message", "code", "trace_id", "span_id"} <= call.keys()
        ids = [(span.trace_id.hex(), span.span_id.hex()) for span in collector.spans]
        assert (call["trace_id"], call["span_id"]) in ids


def test_a_collector_that_is_away_is_complained_of_once_and_holds_nothing_up(folder: Path):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        program = Program(folder, "--log-format", "json", "--otlp-endpoint", endpoint)
        try:
            ready(program)
            began = time.monotonic()
            assert program.end()[0] == 0
            assert time.monotonic() - began < 15
        finally:
            program.kill()
    assert len([line for line in program.lines if line["logger"].startswith("opentelemetry")]) <= 1


def record(name: str = "a", message: str = "hello", **more: Any) -> logging.LogRecord:
    made = logging.LogRecord(name, logging.INFO, "file.py", 1, message, (), None)
    made.__dict__ |= more
    return made


def test_no_message_breaks_out_of_its_line():
    wild = 'a\nb\r\u2028 "c" \x00 é'
    line = JsonFormatter(False).format(record(message=wild, fields={"method": wild, "number": 1.5}))
    assert line.isascii()
    assert len(line.splitlines()) == 1
    assert (json.loads(line)["message"], json.loads(line)["method"]) == (wild, wild)
    shown = TextFormatter(False).format(record(message="call", fields={"method": wild, "code": "OK", "ms": 1.5}))
    assert len(shown.splitlines()) == 1
    assert shown.endswith("code=OK ms=1.5")


def test_what_a_formatter_before_it_kept_of_an_exception_is_not_used():
    try:
        raise ValueError("secret")
    except ValueError as error:
        kept = record(exc_info=(ValueError, error, error.__traceback__), exc_text="secret", hide_message=True)
        assert stack_of(error).endswith("builtins.ValueError")
    assert "secret" not in TextFormatter(False).format(kept).replace('raise ValueError("secret")', "")
    assert json.loads(JsonFormatter(True).format(kept))["stack"].endswith("ValueError: secret")


def test_one_of_many_complaints_is_let_through():
    seldom = Seldom("opentelemetry", 60.0)
    assert [seldom.filter(record("opentelemetry.exporter")) for _ in range(3)] == [True, False, False]
    assert seldom.filter(record("opentelemetry.sdk")) is False
    assert seldom.filter(record("opentelemetry2"))
    assert seldom.filter(record("pyruntime"))
    assert Seldom("opentelemetry", 0.0).filter(record("opentelemetry"))
