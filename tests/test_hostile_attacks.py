"""The attacks of the benchmark do what they say: their bytes reach gRPC as what they are meant to be."""

from __future__ import annotations

import asyncio
import importlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture
def attacks(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("hostile_attacks")


async def test_calls_made_of_plain_bytes_are_calls(attacks: Any) -> None:
    bodies, seen = list[bytes](), threading.Event()

    async def take(request: bytes, context: Any) -> None:
        bodies.append(request)
        seen.set()
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no")

    def once(per_s: float, act: Callable[[int], None]) -> int:
        act(0)
        return int(seen.wait(30))

    server = grpc.aio.server()
    for name, methods in {
        "EmbedService": {"Embed": grpc.unary_unary_rpc_method_handler(take)},
        "GenerateService": {"GenerateStream": grpc.unary_stream_rpc_method_handler(take)},
    }.items():
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(f"pyruntime.v1.{name}", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        for attack in (attacks.bodies, attacks.streams):
            assert await asyncio.to_thread(attack, ("127.0.0.1", port), b"a body", once) == 1
            seen.clear()
    finally:
        await server.stop(None)
    assert bodies == [attacks.GARBAGE[:200], b"a body"]


async def test_every_attack_runs_its_time_and_counts(attacks: Any) -> None:
    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_server(take, "127.0.0.1", 0) as sink:
        address = sink.sockets[0].getsockname()
        for attack in attacks.ATTACKS.values():
            assert await asyncio.to_thread(attack, address, b"", attacks.Ticks(0.05)) >= 1
