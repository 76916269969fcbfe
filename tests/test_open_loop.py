"""The open loop's arithmetic, its sweeps against a queue of known capacity, its table and plots."""

from __future__ import annotations

import importlib
import json
import math
import os
import random
import statistics
import struct
from argparse import Namespace
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture(autouse=True)
def room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def module(name: str) -> ModuleType:
    return importlib.import_module(name)


def seen(at: float, end: float, **fields: Any) -> Any:
    call = module("arrivals").Seen(fields.pop("task", "embed"), at, b"", 1)
    call.sent, call.first, call.end, call.code, call.done = at, end, end, "OK", 1
    for name, value in fields.items():
        setattr(call, name, value)
    return call


# -- arrivals, percentiles, sweep ------------------------------------------------------------------------------------


def test_arrivals_are_those_of_a_poisson_process() -> None:
    """Gaps of mean and deviation 1 / rate; the numbers of equal stretches have a variance equal to their mean."""
    times = module("arrivals").poisson(50.0, 400.0, random.Random(1))
    assert all(a < b for a, b in pairwise(times))
    assert times[0] > 0
    assert times[-1] < 400
    assert len(times) == pytest.approx(20_000, abs=5 * math.sqrt(20_000))
    gaps = [b - a for a, b in pairwise(times)]
    assert statistics.mean(gaps) == pytest.approx(1 / 50, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(1 / 50, rel=0.05)
    counts = [sum(1 for at in times if second <= at < second + 1) for second in range(400)]
    assert statistics.variance(counts) == pytest.approx(50, rel=0.25)


def test_a_seed_gives_the_same_arrivals() -> None:
    poisson = module("arrivals").poisson
    assert poisson(5.0, 10.0, random.Random(3)) == poisson(5.0, 10.0, random.Random(3))
    assert poisson(5.0, 10.0, random.Random(3)) != poisson(5.0, 10.0, random.Random(4))


@pytest.mark.parametrize(("percent", "expected"), [(0, 1), (50, 5), (90, 9), (95, 10), (99, 10), (100, 10)])
def test_a_percentile_is_a_value_that_came_up(percent: float, expected: float) -> None:
    assert module("arrivals").percentile([10, 9, 8, 7, 6, 5, 4, 3, 2, 1], percent) == expected


def test_percentiles_of_one_value_and_of_none() -> None:
    percentile = module("arrivals").percentile
    assert percentile([3.0], 99) == 3.0
    assert math.isnan(percentile([], 50))


@pytest.mark.parametrize("capacity", [0.3, 1.0, 7.0, 100.0])
def test_a_sweep_closes_in_on_what_is_sustained(capacity: float) -> None:
    sweep = module("arrivals").Sweep(2.0, resolution=1.2)
    tried = []
    while (rate := sweep.next_rate()) is not None:
        tried.append(rate)
        sweep.note(rate, rate <= capacity)
    assert sweep.saturation <= capacity < sweep.too_much
    assert sweep.too_much / sweep.saturation <= 1.2
    assert len(tried) == len(set(tried)) <= 12
    assert max(tried) >= 1.5 * sweep.too_much


def test_a_rate_sustained_above_one_that_was_not_is_taken_for_luck() -> None:
    sweep = module("arrivals").Sweep(1.0)
    for rate, held in ((1.0, True), (2.0, False), (4.0, True)):
        sweep.note(rate, held)
    assert (sweep.saturation, sweep.too_much) == (1.0, 2.0)


# -- figures ---------------------------------------------------------------------------------------------------------


def test_latency_counts_from_when_a_call_was_due() -> None:
    """A client that sends the second call 0.4 s late makes its latency longer, not shorter."""
    calls = [seen(1.0, 1.1), seen(1.5, 2.0, sent=1.9)]
    found = module("arrivals").figures(calls, "embed", (0.0, 4.0), 0.3, 1.0)
    assert found["whole"]["p50_ms"] == pytest.approx(100)
    assert found["whole"]["p99_ms"] == pytest.approx(500)
    assert (found["timely"], found["calls"]) == (1, 2)
    told = module("arrivals").lag(calls)
    assert told["late"]
    assert told["p99_ms"] == pytest.approx(400)


def test_rates_are_those_of_the_window_and_refusals_are_told_by_code() -> None:
    calls = [
        seen(0.5, 1.2, done=3, computed=30),  # due before the window, answered within it
        seen(1.5, 1.6, done=5, computed=50),
        seen(2.0, math.nan, code="RESOURCE_EXHAUSTED"),
        seen(2.5, math.nan, code="DEADLINE_EXCEEDED"),
        seen(2.9, 3.4, done=9),  # answered behind it
        seen(1.5, 1.6, task="score"),
    ]
    found = module("arrivals").figures(calls, "embed", (1.0, 3.0), 1.0, 1.0)
    assert (found["offered"], found["achieved"], found["goodput"]) == (2.0, 1.0, 1.0)
    assert (found["done_per_s"], found["computed_per_s"]) == (4.0, 40.0)
    assert found["in_time"] == 0.5
    assert found["refused"] == {"DEADLINE_EXCEEDED": 1, "RESOURCE_EXHAUSTED": 1}
    assert "first" not in found


def test_a_stream_is_in_time_by_its_first_token_and_by_its_pace() -> None:
    calls = [
        seen(0.0, 5.0, first=0.1, gaps=[0.1, 0.1]),
        seen(0.0, 5.0, first=0.1, gaps=[0.1, 0.4]),
        seen(0.0, 5.0, first=2.0, gaps=[0.1]),
    ]
    found = module("arrivals").figures(calls, "embed", (0.0, 1.0), 1.0, 0.2)
    assert found["timely"] == 1
    assert found["first"]["p99_ms"] == pytest.approx(2000)
    assert found["between"]["p50_ms"] == pytest.approx(100)


@pytest.mark.parametrize(
    ("calls", "timely", "held"), [(0, 0, True), (10, 8, True), (10, 7, False), (100, 95, True), (100, 94, False)]
)
def test_a_rate_is_sustained_with_95_percent_in_time(calls: int, timely: int, held: bool) -> None:
    assert module("open_loop").is_sustained({"calls": calls, "timely": timely}) is held


class Queue:
    """In place of a client and its server: one call at a time, each of so many seconds, on no clock at all."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self._seconds = seconds

    async def drive(self, calls: list[Any], deadline_s: float | None = None) -> None:
        free = 0.0
        for call in calls:
            free = max(free, call.at) + self._seconds[call.task]
            call.sent, call.first, call.end, call.done = call.at, free, free, call.size
            late = free - call.at > (deadline_s or module("open_loop_client").TASKS[call.task].deadline_s)
            call.code = "DEADLINE_EXCEEDED" if late else "OK"


async def test_sweeps_find_what_a_queue_sustains() -> None:
    """A queue that serves 40, 10, 8 and 4 calls a second of one task alone serves a quarter of each when mixed; in time
    are fewer, since short calls wait behind others' long ones."""
    rates = {"embed": 40.0, "rerank": 10.0, "score": 8.0, "generate": 4.0}
    limits = module("limits")
    models = {task.model: limits.Model(100, 0, 0) for task in module("open_loop_client").TASKS.values()}
    options = Namespace(dtype="bfloat16", quantization="none", seed=1, minutes=60.0, seconds=30.0)
    options.tasks = [*rates, "mix"]
    queue = Queue({task: 1 / rate for task, rate in rates.items()})
    run = module("open_loop").Run(queue, os.getpid(), limits.Limits(1.0, {"bfloat16": 1.0}, 1), models, options)
    found = await run.all()
    for task, rate in rates.items():
        assert 0.65 * rate < found[task]["sustained"] < 1.1 * rate
        assert found[task]["too_much"] <= 1.2 * found[task]["sustained"]
        assert found[task]["points"][-1]["tasks"][task]["refused"]["DEADLINE_EXCEEDED"] > 0
    load = {task: found[task]["sustained"] / rate for task, rate in rates.items()}
    filled = len(rates) / sum(load.values()) * sum(found[task]["sustained"] for task in rates) / len(rates)
    assert 0.35 * filled < found["mix"]["sustained"] < 1.1 * filled


# -- limits ----------------------------------------------------------------------------------------------------------


def test_limits_of_a_model_follow_from_its_sizes(tmp_path: Path) -> None:
    limits = module("limits")
    tensors = {
        "model.embed_tokens.weight": [1000, 8],
        "model.layers.0.mlp.up_proj.weight": [16, 8],
        "model.layers.1.mlp.up_proj.weight": [16, 8],
        "model.layers.1.norm.weight": [8],
    }
    header = json.dumps({"__metadata__": {}, **{n: {"dtype": "BF16", "shape": s} for n, s in tensors.items()}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    config = {"num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 1000, "hidden_size": 8}
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["SomeForCausalLM"]}))
    model = limits.model_of(tmp_path)
    assert model == limits.Model(body=256, head=8000, cache=2 * 2 * 2 * 4)
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["SomeModel"]}))
    assert limits.model_of(tmp_path) == limits.Model(body=256, head=0, cache=0)

    machine = limits.Limits(1e-6, {"bfloat16": 1e-6}, 1)  # a thousand bytes and a thousand operations a second
    assert model.prompt_s(10, machine, "bfloat16") == pytest.approx(10 * 2 * 256 / 1000)
    # One stream waits for memory: 8,256 weights and 10 tokens of 32 elements, two bytes each; many for arithmetic.
    assert model.decode_s(1, 10, machine, "bfloat16") == pytest.approx((8256 + 320) * 2 / 1000)
    assert model.decode_s(8, 10, machine, "bfloat16") == pytest.approx(8 * 2 * 8256 / 1000)


# -- the report ------------------------------------------------------------------------------------------------------


def result_of(codes: dict[str, int]) -> dict[str, Any]:
    calls = [seen(0.01 * i, 0.01 * i + 0.05, gaps=[0.01]) for i in range(50)]
    found = {**module("arrivals").figures(calls, "embed", (0.0, 1.0), 1.0, 1.0), "refused": codes}
    spent = {"took_s": 1.0, "server_cores": 1.5, "cpu_ms_each": 2.0, "peak_rss_mb": 900.0, "client_cores": 0.1}
    point = {"rate": 50.0, "sustained": True, **spent, "lag": module("arrivals").lag(calls), "of_limit": 0.4}
    point["tasks"] = {"embed": found}
    sweep = {"points": [point], "sustained": 50.0, "too_much": None}
    limits = {"read_gb_per_s": 70.0, "gflop_per_s": {"bfloat16": 900.0}, "threads": 2}
    return {"dtype": "bfloat16", "seconds": 1.0, "limits": limits, "tasks": {"embed": sweep}}


def test_the_table_tells_refusals_cost_and_the_part_of_the_limit() -> None:
    text = module("open_loop_report").table(result_of({"RESOURCE_EXHAUSTED": 3}))
    assert "sustains 50.0 requests/s, more was not tried" in text
    row = next(line for line in text.splitlines() if line.startswith("embed  "))
    for cell in ("50.0, 50.0, 50.0", "10.0, 10.0, 10.0", "2.00", "900", "40%", "RESOURCE_EXHAUSTED 3"):
        assert cell in row


def test_plots_are_drawn_even_of_a_point_without_an_answer(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = result_of({})
    empty = module("arrivals").figures([], "score", (0.0, 1.0), 1.0, 1.0)
    point = {**result["tasks"]["embed"]["points"][0], "tasks": {"score": empty}}
    result["tasks"]["score"] = {"points": [point], "sustained": None, "too_much": 50.0}
    assert "no rate sustained, not 50.0" in module("open_loop_report").table(result)
    module("open_loop_report").plot(result, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000
