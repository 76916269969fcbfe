"""Measures this server over gRPC, and on demand its peers in the same run: ``make bench``.

Prints a table, and writes JSON and a plot under benchmarks/results/. Run it on an otherwise idle machine;
what counts are the ratios of one run. ``make bench BENCH_ARGS="--peers sentence-transformers,vllm"``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import load  # noqa: E402
import report  # noqa: E402
from server_process import running_server  # noqa: E402
from workload import make_workload  # noqa: E402

from pyruntime.model.demo import demo_gguf, demo_models  # noqa: E402

PEERS = {
    "sentence-transformers": "sentence_transformers_peer.py",
    "vllm": "vllm_peer.py",
    "llama.cpp": "llamacpp_peer.py",
}


def main() -> None:
    options = _options()
    options.output.mkdir(parents=True, exist_ok=True)
    work = make_workload().reduced(options.share)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    base = options.output / f"{stamp}-{options.dtype}{'-quick' if options.share > 1 else ''}"

    _say("preparing the models")
    models = demo_models(_say)
    _say("measuring pyruntime")
    with running_server(options.dtype, base.with_suffix(".log")) as address:
        ours = asyncio.run(load.measure(address, work, options.repeats))
    engine = {"engine": "pyruntime", "dtype": options.dtype}
    figures = [{**engine, **figure} for figure in ours]
    for name in options.peers:
        _say(f"measuring {name}")
        figures += _peer(name, models, options)

    result = {"machine": _machine(), "repeats": options.repeats, "share": options.share, "figures": figures}
    base.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    print(report.table(figures))
    report.plot(figures, base.with_suffix(".png"))
    _say(f"wrote {base}.json and .png")


def _options() -> argparse.Namespace:
    def names(text: str) -> list[str]:
        chosen = [name for name in text.split(",") if name]
        if unknown := set(chosen) - set(PEERS):
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(PEERS)}")
        return chosen

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--repeats", type=int, default=3, help="the best of so many runs counts [3]")
    parser.add_argument("--peers", type=names, default=[], metavar="NAME,…", help=f"also measure: {', '.join(PEERS)}")
    parser.add_argument("--share", type=int, default=1, help="every so many-th text only; a quick look [1]")
    parser.add_argument("--output", type=Path, default=HERE / "results")
    return parser.parse_args()


def _peer(name: str, models: dict[str, str], options: argparse.Namespace) -> list[dict[str, Any]]:
    """The figures of one peer, in its own environment, made on first use. Stops the run if it fails."""
    subprocess.run(["bash", HERE / "peers" / "setup.sh", name], check=True)
    python = HERE.parent / "build" / "peers" / name / "bin" / "python"
    with tempfile.TemporaryDirectory() as scratch:
        job = {
            "encoder": models[load.ENCODER],
            "decoder": models[load.DECODER],
            "gguf": str(demo_gguf(Path(scratch))) if name == "llama.cpp" else None,
            "dtype": options.dtype,
            "repeats": options.repeats,
            "share": options.share,
        }
        script = HERE / "peers" / PEERS[name]
        done = subprocess.run([python, script, json.dumps(job)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name} failed with code {done.returncode}:\n{done.stderr[-3000:]}")
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"')]
    return [json.loads(line) for line in lines]


def _machine() -> dict[str, Any]:
    cpu = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        cpu = names[0] if names else cpu
    return {"cpu": cpu, "cores": len(os.sched_getaffinity(0)), "python": platform.python_version()}


def _say(text: str) -> None:
    print(f"[bench] {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
