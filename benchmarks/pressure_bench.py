"""Measures this server under mixed and too much load, and what deterministic mode costs.

``python benchmarks/pressure_bench.py``; needs an otherwise idle machine. Prints the figures and writes them to
benchmarks/results/pressure.json. ``--only mixed,prefix`` runs some of the scenarios.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import grpc.aio  # noqa: E402
import load  # noqa: E402
import pressure  # noqa: E402
from server_process import running_server  # noqa: E402
from workload import make_workload  # noqa: E402

SCENARIOS = {"mixed": pressure.mixed, "prefix": pressure.prefix, "overload": pressure.overload}
SCENARIOS["queue_full"] = pressure.queue_full
NAMES = (*SCENARIOS, "deterministic")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(NAMES), help=f"some of {', '.join(NAMES)} [all]")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "pressure.json")
    parser.add_argument("server_options", nargs="*", help="behind --: options of the server, as --max-batch-tokens 512")
    options = parser.parse_args()
    chosen = options.only.split(",")
    if unknown := set(chosen) - set(NAMES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(NAMES)}")
    figures = []
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "server.log"
        with running_server(options.dtype, log, *options.server_options) as address:
            figures += asyncio.run(_scenarios(address, [name for name in chosen if name in SCENARIOS]))
            if "deterministic" in chosen:
                figures += _named("default", asyncio.run(load.measure(address, make_workload(), 3)))
        if "deterministic" in chosen:
            with running_server(options.dtype, log, "--deterministic", *options.server_options) as address:
                figures += _named("deterministic", asyncio.run(load.measure(address, make_workload(), 3)))
    options.output.write_text(json.dumps({"dtype": options.dtype, "figures": figures}, indent=1) + "\n")
    for figure in figures:
        shown = (
            f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in figure.items()
        )
        print(" ".join(shown))


async def _scenarios(address: str, names: list[str]) -> list[dict[str, Any]]:
    async with grpc.aio.insecure_channel(address) as channel:
        return [await SCENARIOS[name](channel, make_workload()) for name in names]


def _named(mode: str, figures: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"mode": mode, **figure} for figure in figures]


if __name__ == "__main__":
    main()
