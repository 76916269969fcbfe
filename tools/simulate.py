"""Latency and throughput of the scheduler under a made-up load, or a trace of a real one, at simulated time.

    python tools/simulate.py --seconds 60 --generate 4 --embed 40 --score 5
    python tools/simulate.py --trace arrivals.jsonl --max-prompt-tokens-beside 128

A trace is one JSON object a line with the fields of ``pyruntime.scheduler.simulation.Arrival``, as in
{"time_s": 0.5, "task": "generate", "prompt_tokens": 200, "new_tokens": 50, "priority": 1}. Rates are requests a
second, arriving as a Poisson process. The last line of the output is one JSON object with all figures.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pyruntime.scheduler.simulation import Arrival, Machine, Outcome, Simulation, read_arrival  # noqa: E402
from pyruntime.types import Task  # noqa: E402


def made_up(arguments: argparse.Namespace) -> Iterator[Arrival]:
    """Poisson arrivals of each task, lengths around typical ones, a tenth urgent, some cancelled."""
    for number, task in enumerate(Task):
        rng, rate, time_s = random.Random(arguments.seed * 10 + number), getattr(arguments, task.value), 0.0
        while rate > 0 and (time_s := time_s + rng.expovariate(rate)) < arguments.seconds:
            cancelled = rng.random() < arguments.cancelled
            yield Arrival(
                time_s,
                task,
                prompt_tokens=1 + int(rng.expovariate(1 / (200 if task is Task.GENERATE else 60))),
                new_tokens=1 + int(rng.expovariate(1 / 100)) if task is Task.GENERATE else 0,
                items=1 if task is Task.GENERATE else rng.randrange(1, 9),
                priority=int(rng.random() < 0.1),
                prefix_tokens=rng.choice([0, 100]) if task is not Task.EMBED else 0,
                prefix=rng.randrange(4),
                cancel_after_s=rng.expovariate(1.0) if cancelled else None,
            )


def traced(path: Path) -> Iterator[Arrival]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            try:
                yield read_arrival(json.loads(line))
            except ValueError as error:
                raise SystemExit(f"{path}, line {number}: {error}") from error


def quantile(values: list[float], part: float) -> float | None:
    """The least value that ``part`` of them do not exceed; None of none."""
    return sorted(values)[min(int(part * len(values)), len(values) - 1)] if values else None


def figures(outcome: Outcome) -> dict[str, Any]:
    """All figures, times in seconds, by task and as a whole."""
    tasks: dict[str, Any] = {}
    for task in Task:
        requests = [r for r in outcome.requests if r.arrival.task is task]
        if not requests:
            continue
        waits = [r.started_at - r.arrival.time_s for r in requests if r.started_at is not None]
        done = [r.ended_at - r.arrival.time_s for r in requests if r.ended_at is not None and not r.is_cancelled]
        tasks[task.value] = {
            "requests": len(requests),
            "cancelled": sum(r.is_cancelled for r in requests),
            "tokens_a_second": outcome.computed_tokens[task] / outcome.seconds,
            "queue_p50": quantile(waits, 0.5),
            "queue_p99": quantile(waits, 0.99),
            "total_p50": quantile(done, 0.5),
            "total_p99": quantile(done, 0.99),
            "longest_pause": max(r.longest_pause_s for r in requests),
            "set_back": sum(max(s.num_starts - 1, 0) for r in requests for s in r.sequences),
            "cached_tokens": sum(s.cached_tokens for r in requests for s in r.sequences),
        }
    return {
        "seconds": outcome.seconds,
        "steps": outcome.num_steps,
        "longest_step": outcome.longest_step_s,
        "most_blocks_used": outcome.most_blocks_used,
        "tasks": tasks,
    }


def table(found: dict[str, Any]) -> str:
    names = list(next(iter(found["tasks"].values())))
    rows = [["", *found["tasks"]]]
    rows += [[name, *(_shown(task[name]) for task in found["tasks"].values())] for name in names]
    rows += [[name, _shown(value)] for name, value in found.items() if name != "tasks"]
    return "\n".join("  ".join([row[0].ljust(16), *(cell.rjust(10) for cell in row[1:])]) for row in rows)


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, help="JSON lines of arrivals, in place of made-up ones")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60.0, help="of arrivals; the simulation runs until all end")
    for task in Task:
        parser.add_argument(f"--{task.value}", type=float, default=2.0, metavar="RATE", help="requests a second")
    parser.add_argument("--cancelled", type=float, default=0.02, help="share of the requests")
    parser.add_argument("--seconds-a-token", type=float, default=Machine().seconds_a_token)
    parser.add_argument("--num-blocks", type=int, default=4096, help="of 16 tokens each")
    parser.add_argument("--max-batch-tokens", type=int, default=2048)
    parser.add_argument("--max-running", type=int, default=256)
    parser.add_argument("--max-prompt-tokens-beside", type=int, default=256)
    parser.add_argument("--max-pause-factor", type=float, default=3.0)
    parser.add_argument("--priority-ageing-s", type=float, default=30.0)
    return parser.parse_args(argv)


def main(argv: list[str]) -> None:
    arguments = parse(argv)
    passed_on = ("num_blocks", "max_batch_tokens", "max_running", "max_prompt_tokens_beside", "max_pause_factor")
    options = {name: getattr(arguments, name) for name in (*passed_on, "priority_ageing_s")}
    arrivals = list(traced(arguments.trace) if arguments.trace else made_up(arguments))
    if not arrivals:
        raise SystemExit("no arrivals")
    machine = Machine(seconds_a_token=arguments.seconds_a_token)
    found = figures(Simulation(arrivals, machine=machine, **options).run())
    print(table(found))
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
