"""Measures this server over gRPC, and on demand its peers in the same run: ``make bench``.

Rounds in which every engine has its turn at every task, in an order that is drawn anew each time from a fixed seed, so
that all see the machine's ups and downs; the medians count. Before that, the answers of each engine are held against
plain transformers in float32: one that is wrong gives no figure. Prints tables, and writes JSON and a plot under
benchmarks/results/. Run it on an otherwise idle machine.

``make bench BENCH_ARGS=--full`` is the whole comparison; ``--only embed --peers vllm`` a part of it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import aims  # noqa: E402
import report  # noqa: E402
from bench_models import bench_models  # noqa: E402
from engines import GENERATE, OURS, PEERS, Engine, Kind, cpu_seconds, groups, running  # noqa: E402
from workload import UNITS, Workload, make_workload  # noqa: E402

DTYPES = tuple(kind.dtype for kind in OURS)
PEER_NAMES = tuple(dict.fromkeys(kind.engine for kind in PEERS))
TASKS = (*UNITS, "generate")
IDLE_SHARE = 0.02


def main() -> None:
    options = _options()
    # Or the engines, some of them stopped, would outlive a run that is terminated.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    options.output.mkdir(parents=True, exist_ok=True)
    base = options.output / f"{time.strftime('%Y%m%d-%H%M%S')}-peers{'-quick' if options.share > 1 else ''}"
    for name in options.peers:
        subprocess.run(["bash", HERE / "peers" / "setup.sh", name], check=True, stdout=sys.stderr)
    _say("preparing the models")
    models = bench_models(HERE.parent / "build" / "bench-models", _say)
    bench = Bench(options, models, make_workload().reduced(options.share))
    with asyncio.Runner() as runner:
        for kinds in groups(options.dtype, options.peers, options.only):
            bench.run_group(kinds, runner)
    verdicts = aims.verdicts(bench.figures)
    kept = {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()}
    result = {"machine": _machine(), "options": kept, "engines": bench.engines, "checks": bench.checks}
    result |= {"figures": bench.figures, "aims": verdicts}
    base.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    if bench.figures:
        print(report.tables(bench.figures, verdicts))
        report.plot(bench.figures, base.with_suffix(".png"))
    _say(f"wrote {base}.json and .png")
    if any(check["engine"] == aims.US and not check["right"] for check in bench.checks):
        raise SystemExit("answers of this server were wrong: no figures for these")


class Bench:
    """One run: what was measured and found so far."""

    def __init__(self, options: argparse.Namespace, models: dict[str, str], work: Workload) -> None:
        self._options, self._models, self._work = options, models, work
        self._order = random.Random(0)
        self.engines: list[dict[str, Any]] = []
        self.checks: list[dict[str, Any]] = []
        self.figures: list[aims.Figure] = []

    def run_group(self, kinds: list[tuple[Kind, list[str]]], runner: asyncio.Runner) -> None:
        """Starts these engines, checks their answers, measures them in turns and stops them."""
        share, work = self._options.share, self._work
        with tempfile.TemporaryDirectory() as logs, ExitStack() as stack:
            turns: list[tuple[str, Engine]] = []
            for number, (kind, tasks) in enumerate(kinds):
                _say(f"starting {kind.engine} in {kind.dtype} for {', '.join(tasks)}")
                log = Path(logs) / f"{number}.log"
                started = running(kind, tasks, self._models, share, work, log, runner)
                engine = stack.enter_context(started)
                about = {"engine": kind.engine, "dtype": kind.dtype, "tasks": tasks}
                self.engines.append({**about, "version": engine.version, "settings": engine.settings})
                turns += [(task, engine) for task in tasks]
            turns = self._check(turns)
            figures = [self._new_figure(task, engine) for task, engine in turns]
            for round_number in range(1, self._options.rounds + 1):
                for task in UNITS:
                    due = [place for place, (each, _) in enumerate(turns) if each == task]
                    self._order.shuffle(due)
                    for place in due:
                        self._measure(task, turns[place][1], figures[place], [engine for _, engine in turns])
                _say(f"round {round_number} of {self._options.rounds} done")
            self.figures += figures

    def _check(self, turns: list[tuple[str, Engine]]) -> list[tuple[str, Engine]]:
        """Those whose answers are near enough to the reference's."""
        _say("checking answers")
        given = [_named(task, engine) | {"answers": engine.answers(task)} for task, engine in turns]
        with tempfile.TemporaryDirectory() as scratch:
            asked = Path(scratch) / "answers.json"
            asked.write_text(json.dumps({"models": self._models, "share": self._options.share, "answers": given}))
            command = [sys.executable, str(HERE / "reference.py"), str(asked)]
            said = subprocess.run(command, capture_output=True, text=True, check=False)
        if said.returncode:
            raise SystemExit(f"the check of answers failed:\n{said.stderr[-3000:]}")
        right = []
        for turn, verdict in zip(turns, json.loads(said.stdout.splitlines()[-1]), strict=True):
            verdict["allowed"] = aims.allowed(verdict["engine"], verdict["dtype"], verdict["task"])
            verdict["right"] = verdict["distance"] is not None and verdict["distance"] <= verdict["allowed"]
            self.checks.append(verdict)
            if verdict["right"]:
                right.append(turn)
            else:
                _say("NO FIGURE, WRONG ANSWERS: {engine} {dtype} {task}: {distance} of {allowed}".format(**verdict))
        return right

    def _new_figure(self, task: str, engine: Engine) -> aims.Figure:
        return {**_named(task, engine), "unit": UNITS[task], "rounds": [], "idle_cpu_share": []}

    def _measure(self, task: str, engine: Engine, figure: aims.Figure, everyone: list[Engine]) -> None:
        """One turn, its numbers added to the figure's lists. A pass of many tokens is long enough to count alone."""
        idle = list({each.pid: each for each in everyone if each.pid != engine.pid}.values())
        passes = 1 if task in ("generate_16", "generate_64") else self._options.passes
        before, start = cpu_seconds(idle), time.perf_counter()
        numbers = engine.measure(task, passes)
        share = (cpu_seconds(idle) - before) / (time.perf_counter() - start)
        if share > IDLE_SHARE:
            _say(f"while {engine.kind.engine} did {task}, engines that wait took {share:.1%} of a core")
        figure["rounds"].append(numbers.pop(figure["unit"]))
        for key, value in (numbers | {"idle_cpu_share": share}).items():
            figure.setdefault(key, []).append(value)


def _named(task: str, engine: Engine) -> dict[str, Any]:
    return {"engine": engine.kind.engine, "dtype": engine.kind.dtype, "task": task}


def _options() -> argparse.Namespace:
    def names(known: tuple[str, ...]) -> Any:
        def parsed(text: str) -> list[str]:
            found = [name.strip() for name in text.split(",") if name.strip()]
            if unknown := set(found) - set(known):
                raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(known)}")
            return found

        return parsed

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--full", action="store_true", help="all precisions and all peers")
    add = parser.add_argument
    add("--dtype", type=names(DTYPES), default=["bfloat16"], metavar="NAME,…", help=f"ours in: {', '.join(DTYPES)}")
    add("--peers", type=names(PEER_NAMES), default=[], metavar="NAME,…", help=f"beside: {', '.join(PEER_NAMES)}")
    add("--only", type=names(TASKS), default=list(UNITS), metavar="TASK,…", help=f"some of: {', '.join(TASKS)}")
    add("--rounds", type=int, default=5, help="turns of each engine at each task [5]")
    add("--passes", type=int, default=2, help="the best of so many, behind a warm-up, is a turn's figure [2]")
    add("--share", type=int, default=1, help="every so many-th text only; a quick look [1]")
    add("--output", type=Path, default=HERE / "results")
    options = parser.parse_args()
    if "generate" in options.only:
        options.only += GENERATE
    if options.full:
        options.dtype, options.peers = list(DTYPES), list(PEER_NAMES)
    return options


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
    print(f"[bench {time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
