"""Load that does not wait for answers: latency, goodput and cost of the server at rates up to more than it can do.

    python benchmarks/open_loop.py [--tasks embed,rerank,score,generate,mix] [--seconds 8] [--minutes 6]

Requests arrive as Poisson processes and are timed from when they were due, so that a busy client or server hides
nothing. The rate of each task is doubled until the server no longer answers 95 % in time, then that point is searched.
The mix loads the server with all tasks at once, each in proportion to what it sustains alone. Prints a table; writes
JSON and a plot under benchmarks/results/. Run it on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import grpc.aio  # noqa: E402
import open_loop_report as report  # noqa: E402
from arrivals import Seen, Sweep, figures, lag  # noqa: E402
from limits import Limits, Model, model_of  # noqa: E402
from meter import Meter, server_pid  # noqa: E402
from open_loop_client import PAUSE_S, TASKS, Client, event_loop, planned  # noqa: E402
from overhead_bench import RERANKER, make_reranker  # noqa: E402
from server_process import running_server  # noqa: E402

from pyruntime.model.demo import demo_models  # noqa: E402

MIX = "mix"
#: Of a point's time, the part at its start whose calls only bring the server into its stride.
WARM = 0.25
IN_TIME = 0.95
#: Calls that a point should have, for which slow tasks get up to so many times the seconds.
CALLS, STRETCH = 40, 3
#: What a single call gets that is to tell how fast an idle server is.
PATIENCE_S = 60.0

Point = dict[str, Any]


def main() -> None:
    options = _options()
    options.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        _say("measuring the machine")
        limits = _limits(Path(scratch) / "limits.json")
        folders = {**demo_models(_say), RERANKER: str(make_reranker(Path(scratch)))}
        models = {name: model_of(Path(folder)) for name, folder in folders.items()}
        served = [f"--model={RERANKER}={folders[RERANKER]}", f"--quantization={options.quantization}"]
        log = options.output / "open_loop.log"
        with (
            running_server(options.dtype, log, *served, *options.server_options) as address,
            asyncio.Runner(loop_factory=event_loop) as runner,
        ):
            tasks = runner.run(_measure(address, limits, models, options))
    dtype = options.dtype + ("-int8" if options.quantization == "int8" else "")
    result = {"dtype": dtype, "seconds": options.seconds, "limits": asdict(limits), "tasks": tasks}
    base = options.output / f"open-loop-{dtype}"
    base.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    print(report.table(result))
    report.plot(result, base.with_suffix(".png"))
    _say(f"wrote {base}.json and .png")


def _options() -> argparse.Namespace:
    def names(text: str) -> list[str]:
        chosen = text.split(",")
        if unknown := set(chosen) - {*TASKS, MIX}:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}")
        return chosen

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=names, default=[*TASKS, MIX], metavar="NAME,…", help="of them only these")
    parser.add_argument("--seconds", type=float, default=8.0, help="in which requests of a point arrive [8]")
    parser.add_argument("--minutes", type=float, default=6.0, help="for all points; sweeps end earlier for it [6]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--quantization", choices=["none", "int8"], default="none")
    parser.add_argument("--output", type=Path, default=HERE / "results")
    parser.add_argument("server_options", nargs="*", help="behind --: options of the server")
    return parser.parse_args()


def _limits(path: Path) -> Limits:
    """Measured in a process of its own, whose threads are gone when the server is measured."""
    command = [sys.executable, str(HERE / "limits.py"), "--json", str(path)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return Limits(**json.loads(path.read_text()))


async def _measure(
    address: str, limits: Limits, models: dict[str, Model], options: argparse.Namespace
) -> dict[str, Any]:
    gc.collect()
    gc.freeze()  # or collecting between the points goes through all that making the models has left
    async with grpc.aio.insecure_channel(address) as channel:
        return await Run(Client(channel), server_pid(), limits, models, options).all()


class Run:
    """One run of all sweeps against one server, the process ``pid``, which ``client`` asks."""

    def __init__(
        self, client: Client, pid: int, limits: Limits, models: dict[str, Model], options: argparse.Namespace
    ) -> None:
        self._client, self._pid, self._limits, self._models, self._options = client, pid, limits, models, options
        self._kind = "int8" if options.quantization == "int8" else options.dtype
        self._source = random.Random(options.seed)

    async def all(self) -> dict[str, Any]:
        """Task, or mix, → its points and the rates between which it saturates."""
        found: dict[str, Any] = {}
        end = time.monotonic() + self._options.minutes * 60
        for number, name in enumerate(self._options.tasks):
            left = len(self._options.tasks) - number
            until = time.monotonic() + (end - time.monotonic()) / left
            found[name] = await self._sweep(name, found, until)
        return found

    async def _sweep(self, name: str, found: dict[str, Any], until: float) -> dict[str, Any]:
        shares, start = await self._shares(name, found)
        sweep, points = Sweep(start), list[Point]()
        while (rate := sweep.next_rate()) is not None:
            points.append(point := await self._point({task: rate * share for task, share in shares.items()}))
            sweep.note(rate, point["sustained"])
            _say(f"{name}: {report.line(point)}")
            if time.monotonic() + float(point["took_s"]) > until:
                break
        points.sort(key=lambda point: float(point["rate"]))
        return {"points": points, "sustained": sweep.saturation, "too_much": sweep.too_much}

    async def _shares(self, name: str, found: dict[str, Any]) -> tuple[dict[str, float], float]:
        """The part of the requests that each task has, and the rate to begin with.

        A task alone begins at half of what one call after the other would be, streams, which share their steps, at
        twice of it; the mix at a quarter of what should fill the server: each task in proportion to what it sustains.
        """
        if name != MIX:
            return {name: 1.0}, (2 if TASKS[name].streams else 0.5) / await self._seconds_of_one(name)
        alone = {}
        for task in TASKS:
            known = found.get(task, {}).get("sustained")
            alone[task] = known or 1 / await self._seconds_of_one(task)
        total = sum(alone.values())
        return {task: rate / total for task, rate in alone.items()}, total / len(alone) / 4

    async def _seconds_of_one(self, task: str, calls: int = 8) -> float:
        """Mean of some calls, one after the other, behind one that does not count."""
        source, seconds = random.Random(self._options.seed), 0.0
        for number in range(calls + 1):
            request, size = TASKS[task].build(source)
            call = Seen(task, 0.0, request.SerializeToString(), size)
            await self._client.drive([call], PATIENCE_S)
            if call.code != "OK":
                raise RuntimeError(f"{task}: an idle server answered {call.code}")
            seconds += call.whole_s if number else 0.0
        return seconds / calls

    async def _point(self, rates: dict[str, float]) -> Point:
        """All figures at these rates. Streams get half as much time again: they take longer to reach their stride."""
        usual = self._options.seconds * (1.5 if any(TASKS[task].streams for task in rates) else 1)
        seconds = min(max(usual, CALLS / sum(rates.values())), STRETCH * usual)
        calls = planned(rates, seconds, self._source)
        gc.collect()
        began, client_s = time.monotonic(), time.process_time()
        with Meter(self._pid) as meter:
            await self._client.drive(calls)
        took = time.monotonic() - began
        window = (WARM * seconds, seconds)
        by_task = {task: figures(calls, task, window, TASKS[task].objective_s, PAUSE_S) for task in rates}
        return {
            "rate": sum(rates.values()),
            "seconds": seconds,
            "took_s": took,
            "sustained": all(is_sustained(found) for found in by_task.values()),
            "server_cores": meter.cpu_s / took,
            "cpu_ms_each": 1e3 * meter.cpu_s / max(1, sum(call.done for call in calls if call.code == "OK")),
            "peak_rss_mb": meter.peak_rss_mb,
            "client_cores": (time.process_time() - client_s) / took,
            "lag": lag(calls),
            "of_limit": sum(self._limit_s(task, found, calls) for task, found in by_task.items()),
            "tasks": by_task,
        }

    def _limit_s(self, task: str, found: dict[str, Any], calls: list[Seen]) -> float:
        """Seconds that the machine's limits would take for what was done in a second."""
        model = self._models[TASKS[task].model]
        seconds = model.prompt_s(found["computed_per_s"], self._limits, self._kind)
        if TASKS[task].streams and found["in_flight"]:
            own = [call for call in calls if call.task == task and call.code == "OK"]
            context = sum(call.computed + call.done / 2 for call in own) / len(own)
            streams = max(1.0, found["in_flight"])
            seconds += found["done_per_s"] / streams * model.decode_s(streams, context, self._limits, self._kind)
        return seconds


def is_sustained(found: dict[str, Any]) -> bool:
    """Whether 95 % of the calls were in time; two that were not say nothing where few were made."""
    missed = found["calls"] - found["timely"]
    return bool(missed <= max(2, (1 - IN_TIME) * found["calls"]))


def _say(text: str) -> None:
    print(f"[bench] {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
