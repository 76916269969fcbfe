"""Metrics against the calls that were made, over a real channel; the exposition against its own tools."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics_families

from pyruntime.config import Settings
from pyruntime.errors import Overloaded
from pyruntime.telemetry.calls import MOST_FAILURES, MOST_REASONS, OTHER_REASON, CallStats
from pyruntime.telemetry.catalog import METRICS, Kind
from pyruntime.v1 import common_pb2, embed_pb2, generate_pb2, score_pb2
from tests.service.conftest import Stack
from tests.telemetry.help import Page, page_site
from tests.tools import need

PLAIN = lambda data: data  # noqa: E731
GENERATE = "pyruntime.v1.GenerateService/Generate"
STREAM = "pyruntime.v1.GenerateService/GenerateStream"
EMBED = "pyruntime.v1.EmbedService/Embed"
SCORE = "pyruntime.v1.ScoreService/Score"
OTHER = "_OTHER"
NUM_CALLS = 13


@pytest.fixture
async def site() -> AsyncIterator[tuple[Stack, Page]]:
    async with page_site() as both:
        yield both


def generate_request(text: str, count: int, n: int = 1) -> generate_pb2.GenerateRequest:
    return generate_pb2.GenerateRequest(text=text, n=n, stop=generate_pb2.Stop(max_new_tokens=count))


def embed_request(*texts: str, model: str = "") -> embed_pb2.EmbedRequest:
    return embed_pb2.EmbedRequest(model=model, inputs=[common_pb2.Input(text=text) for text in texts])


async def code_of(call: Any) -> str:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"


async def make_calls(stack: Stack) -> None:
    """``NUM_CALLS``: three unary and two streamed generations, two embeds, a score; then five that are refused."""
    for text in ("ab", "abc", "abcd"):
        await stack.generate.Generate(generate_request(text, 6, n=2))
    for _ in range(2):
        chunks = [chunk async for chunk in stack.generate.GenerateStream(generate_request("a", 4))]
        assert sum(len(chunk.token_ids) for chunk in chunks) == 4
    await stack.embed.Embed(embed_request("hello", "you"))
    await stack.embed.Embed(embed_request("me"))
    items = [common_pb2.Input(text="xy"), common_pb2.Input(text="z")]
    query = common_pb2.Input(text="is it")
    await stack.score.Score(score_pb2.ScoreRequest(query=query, items=items, label_token_ids=[1, 2]))
    assert await code_of(stack.embed.Embed(embed_request())) == "INVALID_ARGUMENT"
    assert await code_of(stack.embed.Embed(embed_request("a", model="gone"))) == "NOT_FOUND"
    assert await code_of(stack.generate.Generate(generate_request("a", 10**6))) == "INVALID_ARGUMENT"
    garbage = stack.channel.unary_unary(f"/{EMBED}", PLAIN, PLAIN)
    assert await code_of(garbage(b"\xff\xff")) == "INVALID_ARGUMENT"
    assert await code_of(stack.channel.unary_unary("/pyruntime.v1.Gone/Call", PLAIN, PLAIN)(b"")) == "UNIMPLEMENTED"


async def test_counters_equal_the_calls_that_were_made(site):
    stack, page = site
    await make_calls(stack)
    found = await page.metrics_after(NUM_CALLS)
    requests = {key[1:]: value for key, value in found.items() if key[0] == "pyruntime_requests_total"}
    assert requests == {
        ("OK", GENERATE): 3,
        ("INVALID_ARGUMENT", GENERATE): 1,
        ("OK", STREAM): 2,
        ("OK", EMBED): 2,
        ("INVALID_ARGUMENT", EMBED): 2,
        ("NOT_FOUND", EMBED): 1,
        ("OK", SCORE): 1,
        ("UNIMPLEMENTED", OTHER): 1,
    }
    reasons = {key[1]: value for key, value in found.items() if key[0] == "pyruntime_rejections_total"}
    assert reasons == {"INVALID_FIELD": 2, "NOT_FOUND": 1, "MALFORMED_MESSAGE": 1}
    assert {value for key, value in found.items() if key[0] == "pyruntime_running_requests"} == {0}
    for method, count in ((GENERATE, 4), (STREAM, 2), (EMBED, 5), (SCORE, 1)):
        assert found["pyruntime_request_seconds_count", method] == count
        assert found["pyruntime_request_seconds_bucket", "+Inf", method] == count


async def test_tokens_and_times_equal_the_calls_that_were_made(site):
    stack, page = site
    await make_calls(stack)
    found = await page.metrics_after(NUM_CALLS)
    # A byte is a token, and each text has one before it.
    embedded, scored = 6 + 4 + 3, 6 + 2 + 1
    prompts = (3 + 4 + 5) + 3 + 2 * 2  # each second continuation computes the last token of its prompt itself
    assert found["pyruntime_prompt_tokens_total", "decoder", "generate"] == prompts
    assert found["pyruntime_prompt_tokens_total", "decoder", "embed"] == embedded
    assert found["pyruntime_prompt_tokens_total", "decoder", "score"] == scored
    assert found["pyruntime_batch_tokens_total", "decoder", "generate"] == prompts + 6 * 5 + 2 * 3
    assert found["pyruntime_completion_tokens_total", "decoder"] == 6 * 6 + 2 * 4
    assert found["pyruntime_inter_token_seconds_count", "decoder"] == 6 * 5 + 2 * 3
    assert found["pyruntime_time_to_first_token_seconds_count", "decoder"] == 5
    for task, count in (("generate", 5), ("embed", 2), ("score", 1)):
        assert found["pyruntime_queue_seconds_count", "decoder", task] == count
        assert found["pyruntime_inference_seconds_count", "decoder", task] == count
    steps = (await page.status())["models"][0]["load"]["steps"]
    assert found["pyruntime_step_seconds_count", "decoder"] == found["pyruntime_step_tokens_count", "decoder"] == steps
    assert found["pyruntime_kv_blocks", "decoder", "used"] == 0
    assert sum(found["pyruntime_kv_blocks", "decoder", state] for state in ("used", "cached", "free")) == 2000
    assert found["pyruntime_model_state", "decoder", "serving"] == 1
    assert found["pyruntime_ready",] == 1


async def ended_calls(page: Page, wanted: set[tuple[str, str]]) -> dict[tuple[str, ...], float]:
    """Calls that have ended by code and method, once they are the wanted ones, or after half a second."""
    for _ in range(50):
        found = await page.metrics()
        ended = {key[1:]: value for key, value in found.items() if key[0] == "pyruntime_requests_total"}
        if ended.keys() == wanted:
            break
        await asyncio.sleep(0.01)
    return ended


async def test_calls_that_clients_give_up_and_deadlines(site):
    stack, page = site
    stream = stack.generate.GenerateStream(generate_request("a", 3000))
    await stream.read()
    assert (await page.metrics())["pyruntime_running_requests", STREAM] == 1
    stream.cancel()
    page.compute.hold = True
    counted: dict[tuple[str, ...], float] = {}
    for timeout_s in (0.1, 0.5, 2, 10):  # where the server is slow, the first ones pass before their call arrives
        late = stack.generate.Generate(generate_request("a", 3900), timeout=timeout_s)
        assert await code_of(late) == "DEADLINE_EXCEEDED"
        counted = await ended_calls(page, {("CANCELLED", STREAM), ("DEADLINE_EXCEEDED", GENERATE)})
        if ("DEADLINE_EXCEEDED", GENERATE) in counted:
            break
    page.compute.hold = False
    page.compute.released.release()
    assert counted.keys() == {("CANCELLED", STREAM), ("DEADLINE_EXCEEDED", GENERATE)}
    found = await page.metrics()
    assert found["pyruntime_running_requests", STREAM] == 0
    # A client that changes its mind is no failure.
    assert {each["code"] for each in (await page.status())["failures"]} == {"DEADLINE_EXCEEDED"}


async def test_a_thousand_unknown_methods_and_models_make_no_series(site):
    stack, page = site
    await code_of(stack.channel.unary_unary("/some/Method", PLAIN, PLAIN)(b""))
    await code_of(stack.embed.Embed(embed_request("a", model="gone")))
    before = await page.metrics_after(2)
    for start in range(0, 1000, 100):
        numbers = range(start, start + 100)
        calls = [stack.channel.unary_unary(f"/pyruntime.v1.S{i}/M{i}", PLAIN, PLAIN)(b"") for i in numbers]
        calls += [stack.embed.Embed(embed_request("a", model=f"gone-{i}")) for i in numbers]
        assert {await code_of(call) for call in calls} == {"UNIMPLEMENTED", "NOT_FOUND"}
    after = await page.metrics_after(2002)
    assert after.keys() == before.keys()
    assert after["pyruntime_requests_total", "UNIMPLEMENTED", OTHER] == 1001
    assert after["pyruntime_requests_total", "NOT_FOUND", EMBED] == 1001
    failures = (await page.status())["failures"]
    assert {(each["method"], each["code"], each["times"]) for each in failures} == {
        (OTHER, "UNIMPLEMENTED", 1001),
        (EMBED, "NOT_FOUND", 1001),
    }


async def test_refused_tokens_count_by_the_methods_that_there_are(tmp_path):
    file = tmp_path / "tokens"
    file.write_text("a-token-that-nobody-knows-0123456789\n")
    file.chmod(0o600)
    async with page_site(Settings(port=0, metrics_port=0, token_file=str(file))) as (stack, page):
        assert await code_of(stack.embed.Embed(embed_request("a"))) == "UNAUTHENTICATED"
        for i in range(3):
            call = stack.channel.unary_unary(f"/pyruntime.v1.S{i}/M{i}", PLAIN, PLAIN)(b"")
            assert await code_of(call) == "UNAUTHENTICATED"
        found = await page.metrics_after(4)
    requests = {key[1:]: value for key, value in found.items() if key[0] == "pyruntime_requests_total"}
    assert requests == {("UNAUTHENTICATED", EMBED): 1, ("UNAUTHENTICATED", OTHER): 3}


async def test_a_model_tells_how_its_weights_are_kept(site):
    stack, page = site
    assert (await page.metrics())["pyruntime_model_info", "FakeForCausalLM", "cpu", "float32", "decoder", "none"] == 1
    stack.decoder.info = replace(stack.decoder.info, dtype="bfloat16", quantization="int8")
    assert (await page.metrics())["pyruntime_model_info", "FakeForCausalLM", "cpu", "bfloat16", "decoder", "int8"] == 1
    model = (await page.status())["models"][0]
    assert (model["dtype"], model["quantization"]) == ("bfloat16", "int8")


async def test_a_model_that_goes_takes_its_series_along(site):
    stack, page = site
    await make_calls(stack)
    stack.registry.declare('torn <b>&"\\\n', "x")
    stack.registry.set_failed('torn <b>&"\\\n', "weights are torn")
    found = await page.metrics()
    assert found["pyruntime_model_state", 'torn <b>&"\\\n', "failed"] == 1
    stack.registry.remove("decoder")
    stack.registry.remove('torn <b>&"\\\n')
    assert not [key for key in await page.metrics() if {"decoder", 'torn <b>&"\\\n'} & {*key}]


async def test_scrapers_get_the_format_that_they_ask_for(site):
    stack, page = site
    await make_calls(stack)
    status, headers, body = await page.get("/metrics", Accept="application/openmetrics-text; version=1.0.0, */*;q=0.1")
    assert (status, headers["content-type"].partition(";")[0]) == (200, "application/openmetrics-text")
    families = {family.name: family for family in open_metrics_families(body.decode())}
    exposed = {each.name.removesuffix("_total"): each for each in METRICS}
    own = {name: family for name, family in families.items() if name.startswith("pyruntime_")}
    assert own.keys() == exposed.keys()
    for name, family in own.items():
        assert family.type == exposed[name].kind.value
        labels = {frozenset(sample.labels) - {"le"} for sample in family.samples}
        assert labels <= {frozenset(exposed[name].labels)}
    assert {"process_cpu_seconds", "process_resident_memory_bytes", "python_gc_collections"} <= families.keys()
    status, headers, body = await page.get("/metrics")
    assert (status, headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")


async def test_promtool_finds_nothing_to_complain_about(site):
    stack, page = site
    promtool = need("promtool", "apt-get install prometheus")
    await make_calls(stack)
    _, _, body = await page.get("/metrics")
    command, options = [promtool, "check", "metrics"], {"input": body, "capture_output": True, "timeout": 30}
    checked = await asyncio.to_thread(subprocess.run, command, **options)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")


def test_counters_are_named_as_counters():
    for each in METRICS:
        assert each.name.endswith("_total") == (each.kind is Kind.COUNTER)
        assert each.name.startswith("pyruntime_")


def test_reasons_and_failures_are_bounded():
    calls = CallStats()
    for i in range(1000):
        calls.begin("m")
        calls.end("m", 0.1, "INTERNAL", f"REASON_{i}")
    assert len(calls.reasons) == MOST_REASONS + 1
    assert calls.reasons[OTHER_REASON] == 1000 - MOST_REASONS
    assert len(calls.failures) == MOST_FAILURES
    assert [each.reason for each in calls.failures.values()][-1] == "REASON_999"
    calls.begin("m")
    calls.end("m", 0.1, "INTERNAL", "REASON_970")  # again: it moves to the end and nothing is lost
    assert len(calls.failures) == MOST_FAILURES
    assert [(each.reason, each.times) for each in calls.failures.values()][-1] == ("REASON_970", 2)
    assert Overloaded.reason not in calls.reasons
