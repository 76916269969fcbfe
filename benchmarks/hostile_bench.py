"""What clients that misbehave cost those that do not: embeddings a second, alone and beside each kind of attack.

    python benchmarks/hostile_bench.py [--rounds 5] [--seconds 2] [--attacks connects,bodies]

Run it on an otherwise idle machine. Attackers share it with the server, so what they cost includes their own processor
time and the kernel's. Therefore each attack also goes to somebody else, beside the same embeddings: to a process that
takes bytes and answers nothing, and to a bare ``grpc.aio`` server. The ratio to the first is what the server's handling
leaves; the second tells what of that is gRPC's. All take turns; figures are medians. Last each attack goes to the
server and to the bare one without embeddings, for the processor time of one act, which says more on a busy machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import grpc.aio  # noqa: E402
from hostile_attacks import ATTACKS  # noqa: E402
from meter import Meter, server_pid  # noqa: E402
from server_process import running_server  # noqa: E402

from pyruntime.v1 import common_pb2, embed_pb2, embed_pb2_grpc, generate_pb2  # noqa: E402

TEXTS = [f"text number {i} of those that are embedded while others misbehave" for i in range(16)]
IN_FLIGHT = 4
ONE_TOKEN = generate_pb2.GenerateRequest(
    model="gemma-3-270m", text="nobody reads this", stop=generate_pb2.Stop(max_new_tokens=1, ignore_eos=True)
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each turn [2]")
    parser.add_argument("--attacks", default=",".join(ATTACKS), help="of them only these")
    parser.add_argument("--output", type=Path, default=HERE / "results")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    with (
        running_server("bfloat16", options.output / "hostile.log") as address,
        _sink("sockets") as (nobody, _),
        _sink("grpc") as (bare, bare_pid),
    ):
        targets = {"nobody": nobody, "bare": bare, "server": address}
        figures = asyncio.run(_measure(address, targets, {"bare": bare_pid, "server": server_pid()}, options))
    (options.output / "hostile.json").write_text(json.dumps(figures, indent=1) + "\n")


@contextlib.contextmanager
def _sink(kind: str) -> Iterator[tuple[str, int]]:
    """Its address and process id."""
    command = [sys.executable, str(HERE / "hostile_sinks.py"), kind]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"127.0.0.1:{int(process.stdout.readline())}", process.pid
        finally:
            process.kill()


async def _measure(
    address: str, targets: dict[str, str], pids: dict[str, int], options: argparse.Namespace
) -> list[dict[str, Any]]:
    figures = []
    async with grpc.aio.insecure_channel(address) as channel:
        stub = embed_pb2_grpc.EmbedServiceStub(channel)
        await embeddings_per_s(stub, options.seconds)
        for name in options.attacks.split(","):
            figures.append(await _figures(name, stub, targets, pids, options))
            print(_line(figures[-1]), flush=True)
    return figures


async def _figures(
    name: str,
    stub: embed_pb2_grpc.EmbedServiceStub,
    targets: dict[str, str],
    pids: dict[str, int],
    options: argparse.Namespace,
) -> dict[str, Any]:
    rates: dict[str, list[float]] = {"alone": []} | {target: [] for target in targets}
    for _ in range(options.rounds):
        rates["alone"].append(await embeddings_per_s(stub, options.seconds))
        for target, address in targets.items():
            with _attack(name, address, options.seconds):
                rates[target].append(await embeddings_per_s(stub, options.seconds))
    found: dict[str, Any] = {target: statistics.median(column) for target, column in rates.items()}
    us_each = {target: _us_each(name, targets[target], pid, options.seconds) for target, pid in pids.items()}
    return {
        "attack": str(ATTACKS[name].__doc__),
        "texts_per_s": found,
        "ratio": found["server"] / found["alone"],
        "of_nobody": found["server"] / found["nobody"],
        "bare_of_nobody": found["bare"] / found["nobody"],
        "cpu_us_each": us_each,
    }


def _line(figures: dict[str, Any]) -> str:
    rates = ", ".join(f"{target} {rate:.0f}" for target, rate in figures["texts_per_s"].items())
    costs = ", ".join(f"{target} {us:.0f}" for target, us in figures["cpu_us_each"].items())
    return (
        f"{figures['attack']}\n  {rates} texts/s: {figures['ratio']:.2f} of alone, {figures['of_nobody']:.2f} of what "
        f"is left when nobody answers (bare {figures['bare_of_nobody']:.2f}); processor time {costs} us each"
    )


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


@contextlib.contextmanager
def _attack(name: str, address: str, seconds: float) -> Iterator[Callable[[], int]]:
    """Goes on meanwhile; what is yielded waits for its end and tells how many times it was done."""
    host, port = address.split(":")
    command = [
        sys.executable,
        "-S",
        str(HERE / "hostile_attacks.py"),
        name,
        host,
        port,
        ONE_TOKEN.SerializeToString().hex(),
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.stdin.write(f"{seconds}\n")
        process.stdin.flush()
        output = process.stdout
        yield lambda: int(output.readline())


def _us_each(name: str, address: str, pid: int, seconds: float) -> float:
    """Microseconds of the process ``pid`` for one act of the attack, with nothing else to do."""
    with Meter(pid) as meter, _attack(name, address, seconds) as times:
        count = times()
    return meter.cpu_s / count * 1e6


if __name__ == "__main__":
    main()
