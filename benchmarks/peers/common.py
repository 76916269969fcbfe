"""What the peers' runners share. Runs in each peer's own environment: the standard library only."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from workload import Workload, make_workload


def best_seconds(run: Callable[[], object], repeats: int) -> float:
    """The fastest of ``repeats`` runs, after a warm-up."""
    run()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def report(**figures: object) -> None:
    """One figure as a JSON line; lines that are not JSON objects are the peer's own chatter."""
    print("\n" + json.dumps(figures), flush=True)


def load_job() -> tuple[dict, Workload]:
    """(job, workload) from the first argument: JSON with ``encoder``, ``decoder`` (folders), ``gguf`` (file
    or null), ``dtype``, ``repeats`` and ``share`` (1: the whole workload).
    """
    job = json.loads(sys.argv[1])
    return job, make_workload().reduced(job["share"])
