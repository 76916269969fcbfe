"""The open loop's arithmetic, and its client against a server that answers at times known beforehand."""

from __future__ import annotations

import asyncio
import importlib
import json
import math
import random
import statistics
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc.aio
import pytest

from pyruntime.v1 import embed_pb2, embed_pb2_grpc, generate_pb2, generate_pb2_grpc

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
    ("calls", "timely", "held"), [(0, 0, True), (10, 9, True), (10, 8, False), (100, 95, True), (100, 94, False)]
)
def test_a_rate_is_sustained_with_95_percent_in_time(calls: int, timely: int, held: bool) -> None:
    assert module("open_loop").is_sustained({"calls": calls, "timely": timely}) is held


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


# -- the client ------------------------------------------------------------------------------------------------------


class Embed(embed_pb2_grpc.EmbedServiceServicer):
    """Refuses every third call; answers the others together, when the last one has come."""

    def __init__(self, calls: int) -> None:
        self._left, self._all = calls, asyncio.Event()

    async def Embed(self, request: Any, context: Any) -> embed_pb2.EmbedResponse:
        self._left -= 1
        if self._left == 0:
            self._all.set()
        if self._left % 3 == 1:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
        await self._all.wait()
        dense = embed_pb2.DenseEmbedding(packed=bytes(384 * 4), dimensions=384)
        answer = embed_pb2.EmbedResponse(results=[embed_pb2.EmbedResult(dense=dense) for _ in request.inputs])
        answer.usage.prompt_tokens = 10
        answer.usage.cached_tokens = 4
        return answer


class Generate(generate_pb2_grpc.GenerateServiceServicer):
    """As many tokens as asked for, in messages of at most five, and ``short`` less."""

    def __init__(self, short: int = 0) -> None:
        self._short = short

    async def GenerateStream(self, request: Any, context: Any) -> AsyncIterator[generate_pb2.GenerateChunk]:
        left = request.stop.max_new_tokens - self._short
        while left:
            chunk = generate_pb2.GenerateChunk(token_ids=[7] * min(5, left))
            left -= len(chunk.token_ids)
            if not left:
                chunk.usage.prompt_tokens = 12
            yield chunk


@asynccontextmanager
async def client_of(embed: Any, generate: Any) -> AsyncIterator[Any]:
    server = grpc.aio.server()
    embed_pb2_grpc.add_EmbedServiceServicer_to_server(embed, server)
    generate_pb2_grpc.add_GenerateServiceServicer_to_server(generate, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield module("open_loop_client").Client(channel)
    finally:
        await server.stop(None)


async def test_arrivals_do_not_wait_for_answers() -> None:
    """No call is answered before the last has come: a client that waited for one would never send the others."""
    calls = module("open_loop_client").planned({"embed": 100.0}, 0.2, random.Random(0))
    async with client_of(Embed(len(calls)), Generate()) as client:
        await client.drive(calls, 60.0)
    assert len(calls) > 9
    assert all(call.sent >= call.at for call in calls)
    answered = [call for call in calls if call.code == "OK"]
    assert {call.code for call in calls} == {"OK", "RESOURCE_EXHAUSTED"}
    assert all(call.done == call.size and call.computed == 6 and call.end >= call.sent for call in answered)
    assert min(call.end for call in answered) >= max(call.sent for call in calls)


async def test_streams_are_counted_by_tokens_and_timed_by_messages() -> None:
    calls = module("open_loop_client").planned({"generate": 100.0}, 0.1, random.Random(2))
    async with client_of(Embed(0), Generate()) as client:
        await client.drive(calls, 60.0)
    assert len(calls) > 3
    for call in calls:
        assert (call.code, call.done, call.computed) == ("OK", call.size, 12)
        assert len(call.gaps) == math.ceil(call.size / 5) - 1
        assert call.first + sum(call.gaps) == pytest.approx(call.end)


async def test_an_answer_that_lacks_a_part_ends_the_run() -> None:
    calls = module("open_loop_client").planned({"generate": 100.0}, 0.05, random.Random(2))
    async with client_of(Embed(0), Generate(short=1)) as client:
        with pytest.raises(RuntimeError, match="generate: "):
            await client.drive(calls, 60.0)


def test_a_seed_gives_the_same_requests() -> None:
    """But for their numbers, which keep a prefix cache from knowing them."""
    client = module("open_loop_client")
    one, other = (client.planned({"embed": 20.0, "rerank": 20.0}, 1.0, random.Random(5)) for _ in range(2))
    assert [(c.task, c.at, c.body, c.size) for c in one] == [(c.task, c.at, c.body, c.size) for c in other]
    assert [call.at for call in one] == sorted(call.at for call in one)
    assert all(1 <= call.size <= 32 for call in one)


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
