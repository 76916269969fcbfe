"""What clients that misbehave cost those that do not: embeddings a second, alone and beside each kind of attack.

``python benchmarks/hostile_bench.py``, on an otherwise idle machine. Attackers share the machine with the server, so
what they cost includes their own processor time. Alone and beside take turns; the ratio is of the medians.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import grpc.aio  # noqa: E402
from server_process import running_server  # noqa: E402

from pyruntime.v1 import common_pb2, embed_pb2, embed_pb2_grpc, generate_pb2, generate_pb2_grpc  # noqa: E402

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04\x00" + bytes(4)
TEXTS = [f"text number {i} of those that are embedded while others misbehave" for i in range(16)]
IN_FLIGHT = 4

Attack = Callable[[str, int], Awaitable[None]]


async def connects(host: str, port: int) -> None:
    """10,000 connections a minute, each closed at once."""
    while True:
        _, writer = await asyncio.open_connection(host, port)
        writer.close()
        await asyncio.sleep(60 / 10_000)


async def garbage(host: str, port: int) -> None:
    """Random bytes, 50 connections a second."""
    while True:
        _, writer = await asyncio.open_connection(host, port)
        writer.write(os.urandom(4096))
        await asyncio.sleep(0.02)
        writer.close()


async def half_messages(host: str, port: int) -> None:
    """A preface and the beginning of a frame that never goes on, 20 connections a second, all kept."""
    kept = []
    try:
        while True:
            kept.append((await asyncio.open_connection(host, port))[1])
            kept[-1].write(PREFACE + b"\x00\x40\x00\x01\x04\x00\x00\x00\x01half a header block")
            await asyncio.sleep(0.05)
    finally:
        for writer in kept:
            writer.close()


async def bad_calls(host: str, port: int) -> None:
    """Calls whose bodies are no messages, 100 a second."""
    async with grpc.aio.insecure_channel(f"{host}:{port}") as channel:
        call = channel.unary_unary("/pyruntime.v1.EmbedService/Embed")
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await call(os.urandom(200))
            await asyncio.sleep(0.01)


async def slow_reads(host: str, port: int) -> None:
    """Streams of a decoder that nobody reads."""
    async with grpc.aio.insecure_channel(f"{host}:{port}") as channel:
        stub = generate_pb2_grpc.GenerateServiceStub(channel)
        stop = generate_pb2.Stop(max_new_tokens=1, ignore_eos=True)
        while True:
            request = generate_pb2.GenerateRequest(model="gemma-3-270m", text="nobody reads this", stop=stop)
            calls = [stub.GenerateStream(request) for _ in range(2)]
            await asyncio.sleep(1)
            for call in calls:
                call.cancel()


ATTACKS: dict[str, Attack] = {
    "10,000 connects a minute": connects,
    "garbage bytes": garbage,
    "half messages": half_messages,
    "bodies that are no messages": bad_calls,
    "streams that nobody reads": slow_reads,
}


async def embeddings_per_s(stub: embed_pb2_grpc.EmbedServiceStub, seconds: float) -> float:
    request = embed_pb2.EmbedRequest(model="all-minilm-l6-v2", inputs=[common_pb2.Input(text=text) for text in TEXTS])
    end, done = time.perf_counter() + seconds, 0

    async def ask() -> None:
        nonlocal done
        while time.perf_counter() < end:
            done += len((await stub.Embed(request)).results)

    began = time.perf_counter()
    await asyncio.gather(*(ask() for _ in range(IN_FLIGHT)))
    return done / (time.perf_counter() - began)


async def beside(attack: Attack, stub: embed_pb2_grpc.EmbedServiceStub, address: str, seconds: float) -> float:
    host, port = address.split(":")
    attacker = asyncio.create_task(attack(host, int(port)))
    try:
        return await embeddings_per_s(stub, seconds)
    finally:
        attacker.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await attacker


async def measure(address: str, rounds: int, seconds: float) -> list[dict[str, float | str]]:
    figures: list[dict[str, float | str]] = []
    async with grpc.aio.insecure_channel(address) as channel:
        stub = embed_pb2_grpc.EmbedServiceStub(channel)
        await embeddings_per_s(stub, seconds)
        for name, attack in ATTACKS.items():
            pairs = [
                (await embeddings_per_s(stub, seconds), await beside(attack, stub, address, seconds))
                for _ in range(rounds)
            ]
            alone, attacked = (statistics.median(column) for column in zip(*pairs, strict=True))
            figures.append({"attack": name, "alone": alone, "beside": attacked, "ratio": attacked / alone})
            print(f"{name}: {attacked:.0f} texts/s, alone {alone:.0f}: {attacked / alone:.2f}", flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each turn [2]")
    parser.add_argument("--output", type=Path, default=HERE / "results")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    with running_server("bfloat16", options.output / "hostile.log") as address:
        figures = asyncio.run(measure(address, options.rounds, options.seconds))
    (options.output / "hostile.json").write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
