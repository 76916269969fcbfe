"""A peer's side of the benchmark: it loads once, then answers what it is asked over a pipe.

The parent sends a JSON line ``{"do": "answers" | "measure", "task": …, "passes": …}`` and reads one JSON line back.
Between the lines the process waits in a read and uses no processor. Runs in each peer's own environment: the
standard library only.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from workload import SHORT_CALLS, UNITS, Workload, make_workload

# What engines print goes to the log, so that the pipe carries answers alone.
_pipe = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

CORES = len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Job:
    """``models``: folders ``encoder``, ``reranker``, ``decoder``, file ``gguf``, and ``made``, a folder that keeps what
    a peer makes of them. ``dtype``: float32, bfloat16 or int8. ``tasks``: those that this process will be asked for.
    """

    models: dict[str, str]
    dtype: str
    tasks: list[str]
    work: Workload


def load_job() -> Job:
    """What this process is for, from its first argument. ``share``: every so many-th text only."""
    fields = json.loads(sys.argv[1])
    return Job(fields["models"], fields["dtype"], fields["tasks"], make_workload().reduced(fields["share"]))


@dataclass(frozen=True)
class Task:
    """``run(number)`` does the whole work once and returns the answers; ``number`` is another one each time, for
    engines that would find a repeated prompt in a cache.
    """

    run: Callable[[int], Any]
    #: Makes plain lists of what ``run`` returned, off the clock.
    plain: Callable[[Any], Any] = lambda answers: answers


def serve(engine: str, version: str, job: Job, tasks: dict[str, Task], settings: dict[str, Any]) -> None:
    """Answers until the pipe closes. ``settings`` is what the engine was found to be fastest with, for the record."""
    _send({"engine": engine, "version": version, "dtype": job.dtype, "tasks": list(tasks), "settings": settings})
    number = 0
    for line in sys.stdin:
        asked = json.loads(line)
        task = tasks[asked["task"]]
        if asked["do"] == "answers":
            _send({"answers": task.plain(task.run(0))})
            continue
        numbers = range(number + 1, number + 2 + asked["passes"])
        number = numbers[-1]
        _send(_measure(job, asked["task"], task, numbers))


def _measure(job: Job, name: str, task: Task, numbers: range) -> dict[str, float]:
    """The best of all passes but the first, which is a warm-up; processor time over all of them."""
    cpu = time.process_time()
    seconds = [_one_pass(name, task, number) for number in numbers]
    amount = job.work.amount(name)
    spent = (time.process_time() - cpu) / (len(numbers) * amount)
    best = min(seconds[1:])
    unit = UNITS[name]
    return {
        unit: best * 1e3 if unit == "p50_ms" else amount / best,
        "cpu_ms_each": spent * 1e3,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
    }


def _one_pass(name: str, task: Task, number: int) -> float:
    """Seconds of the work; of ``embed_one`` the median over its calls."""
    if name == "embed_one":
        return statistics.median(_seconds(task, number) for _ in range(SHORT_CALLS))
    return _seconds(task, number)


def _seconds(task: Task, number: int) -> float:
    start = time.perf_counter()
    task.run(number)
    return time.perf_counter() - start


def fastest(choices: list[Any], run: Callable[[Any], object]) -> Any:
    """The choice with which ``run`` takes least time, after a warm-up."""
    run(choices[0])

    def seconds(choice: Any) -> float:
        return _seconds(Task(lambda _: run(choice)), 0)

    return min(choices, key=seconds)


def _send(message: dict[str, Any]) -> None:
    print(json.dumps(message), file=_pipe, flush=True)
