"""Traces arrive at a collector, joined to the caller's, over real sockets and a real engine with a fake model."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Iterator

import grpc
import pytest
from grpc_health.v1 import health_pb2

from pyruntime.config import Settings
from pyruntime.telemetry.tracing import FLUSH_S, Tracing, TracingUnavailable, open_tracing, parse_traceparent
from pyruntime.v1 import common_pb2, embed_pb2, generate_pb2, model_pb2, score_pb2
from tests.fake_compute import until
from tests.service.call_site import Collector, Log, attributes, call_site

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = (("traceparent", f"00-{TRACE}-{CALLER}-01"), ("tracestate", "vendor=opaque"))
WILD = (("traceparent", "Canary"), ("tracestate", "Canary=Canary"), ("baggage", "Canary, Canary=Canary;; Canary"))
SETTINGS = Settings(port=0)
GENERATE = generate_pb2.GenerateRequest(text="hi", stop=generate_pb2.Stop(max_new_tokens=5))
EMBED = embed_pb2.EmbedRequest(inputs=[{"text": "some words"}])
SCORE = score_pb2.ScoreRequest(
    query=common_pb2.Input(text="q"), items=[common_pb2.Input(text="a")], labels=["x", "y"], apply_softmax=True
)
ERROR = 2


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as started:
        yield started


async def closed(tracing: Tracing) -> None:
    await asyncio.to_thread(tracing.close)


async def test_calls_join_the_callers_trace_with_a_span_a_stage(collector: Collector):
    tracing = Tracing(collector.endpoint)
    async with call_site(SETTINGS, tracing) as (stack, _):
        await stack.generate.Generate(GENERATE, metadata=SAMPLED)
        chunks = [chunk async for chunk in stack.generate.GenerateStream(GENERATE, metadata=SAMPLED)]
        assert chunks[-1].usage.completion_tokens == 5
        await stack.embed.Embed(EMBED, metadata=SAMPLED)
        await stack.score.Score(SCORE, metadata=SAMPLED)
    await closed(tracing)
    stages = {
        "GenerateService/Generate": ["tokenize", "queue", "prefill", "decode"],
        "GenerateService/GenerateStream": ["tokenize", "queue", "prefill", "decode"],
        "EmbedService/Embed": ["tokenize", "queue", "compute", "encode"],
        "ScoreService/Score": ["tokenize", "queue", "compute", "encode"],
    }
    for method, names in stages.items():
        call = collector.call(method)
        assert (call.trace_id.hex(), call.parent_span_id.hex(), call.trace_state) == (TRACE, CALLER, "vendor=opaque")
        assert (call.kind, call.status.code) == (2, 0)
        below = collector.stages(call)
        assert [span.name for span in below] == names
        for span, following in zip(below, [*below[1:], None], strict=True):
            assert span.trace_id.hex() == TRACE
            assert call.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
            assert span.end_time_unix_nano <= call.end_time_unix_nano
            assert following is None or span.end_time_unix_nano <= following.start_time_unix_nano
    assert len(collector.spans) == 4 + 16
    assert "some words" not in str(collector.spans)


async def test_what_a_span_says(collector: Collector):
    tracing = Tracing(collector.endpoint)
    async with call_site(SETTINGS, tracing) as (stack, _):
        await stack.generate.Generate(GENERATE, metadata=(*SAMPLED, ("x-request-id", "mine")))
    await closed(tracing)
    assert attributes(collector.call("Generate")) == {
        "rpc.system.name": "grpc",
        "rpc.method": "pyruntime.v1.GenerateService/Generate",
        "rpc.response.status_code": "OK",
        "pyruntime.request_id": "mine",
        "pyruntime.requests": 1,
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "decoder",
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 0,
    }
    assert collector.resource["service.name"] == "pyruntime"


async def test_errors_are_recorded_and_only_the_servers_own_make_a_span_one(collector: Collector):
    tracing = Tracing(collector.endpoint)
    async with call_site(SETTINGS, tracing) as (stack, compute):
        with pytest.raises(grpc.aio.AioRpcError):
            await stack.models.GetModel(model_pb2.GetModelRequest(model="secret"))
        with pytest.raises(grpc.aio.AioRpcError):
            await stack.embed.Embed(embed_pb2.EmbedRequest(inputs=[{"text": ""}]))
        compute.broken = True
        with pytest.raises(grpc.aio.AioRpcError), Log().kept() as log:
            await stack.generate.Generate(GENERATE, metadata=(("x-request-id", "mine"),))
        with pytest.raises(grpc.aio.AioRpcError):
            await stack.channel.unary_unary("/secret/Secret")(b"")
    await closed(tracing)
    (failed,) = [line for line in log.lines if line["logger"] == "pyruntime.step_runner"]
    assert failed["request_ids"] == ["mine"]
    missing, empty = collector.call("GetModel"), collector.call("Embed")
    assert (missing.status.code, attributes(missing)["rpc.response.status_code"]) == (0, "NOT_FOUND")
    assert attributes(missing)["pyruntime.reason"] == "NOT_FOUND"
    assert (empty.status.code, attributes(empty)["pyruntime.field"]) == (0, "inputs[0].text")
    broken, unknown = collector.call("Generate"), collector.call("_OTHER")
    assert (broken.status.code, broken.status.message) == (ERROR, "COMPUTE_FAULT")
    assert attributes(broken)["error.type"] == "INTERNAL"
    assert attributes(unknown)["rpc.method"] == "_OTHER"
    assert (unknown.status.code, attributes(unknown)["rpc.response.status_code"]) == (ERROR, "UNIMPLEMENTED")
    assert not any(span.events for span in collector.spans)
    assert "ecret" not in str(collector.spans)


async def test_a_stream_that_is_broken_off_ends_its_span(collector: Collector):
    tracing = Tracing(collector.endpoint)
    async with call_site(SETTINGS, tracing) as (stack, compute):
        endless = generate_pb2.GenerateRequest(text="hi", stop=generate_pb2.Stop(max_new_tokens=3000))
        call = stack.generate.GenerateStream(endless, metadata=SAMPLED)
        assert (await call.read()).text.startswith("a")
        call.cancel()
        await until(lambda: stack.server.num_running == 0)
        compute.hold = True
        late_call = stack.embed.Embed(EMBED)
        await until(lambda: stack.server.num_running == 1)
        late_call.cancel()
        await until(lambda: stack.server.num_running == 0)
        compute.hold = False
        compute.released.release()
    await closed(tracing)
    stream, unary = collector.call("GenerateStream"), collector.call("Embed")
    assert (attributes(stream)["rpc.response.status_code"], stream.status.code) == ("CANCELLED", 0)
    assert attributes(stream)["gen_ai.usage.output_tokens"] >= 1
    assert [span.name for span in collector.stages(stream)] == ["tokenize", "queue", "prefill", "decode"]
    assert (attributes(unary)["rpc.response.status_code"], unary.status.code) == ("CANCELLED", 0)
    assert [span.name for span in collector.stages(unary)] == ["tokenize"]


async def test_a_constraint_is_a_stage_of_its_own(collector: Collector):
    tracing = Tracing(collector.endpoint)
    async with call_site(SETTINGS, tracing) as (stack, _):
        request = generate_pb2.GenerateRequest(text="hi", constraint={"regex": "[a-z]{9}"})
        request.stop.max_new_tokens = 2
        await stack.generate.Generate(request)
    await closed(tracing)
    names = [span.name for span in collector.stages(collector.call("Generate"))]
    assert names == ["tokenize", "constrain", "queue", "prefill", "decode"]


async def test_a_stream_of_requests_sums_them_up_and_keeps_the_stages_of_the_first(collector: Collector):
    tracing = Tracing(collector.endpoint)
    async with call_site(SETTINGS, tracing) as (stack, _):
        answers = [each async for each in stack.embed.EmbedStream(iter([EMBED] * 40))]
        assert len(answers) == 40
    await closed(tracing)
    call = collector.call("EmbedStream")
    assert attributes(call)["pyruntime.requests"] == 40
    assert attributes(call)["gen_ai.usage.input_tokens"] == sum(each.usage.prompt_tokens for each in answers)
    assert len(collector.stages(call)) == 64


async def test_what_the_caller_does_not_sample_and_probes_are_not_sent_but_keep_their_trace_id(collector: Collector):
    tracing = Tracing(collector.endpoint)
    with Log().kept() as log:
        async with call_site(SETTINGS, tracing) as (stack, _):
            await stack.embed.Embed(EMBED, metadata=(("traceparent", f"00-{TRACE}-{CALLER}-00"),))
            await stack.health.Check(health_pb2.HealthCheckRequest(), metadata=SAMPLED)
            await stack.models.ListModels(model_pb2.ListModelsRequest(), metadata=WILD)
        await closed(tracing)
    assert [span.name for span in collector.spans] == ["pyruntime.v1.ModelService/ListModels"]
    assert [line.get("trace_id") == TRACE for line in log.calls] == [True, True, False]
    assert "Canary" not in log.raw


async def test_a_collector_that_is_away_holds_nothing_up():
    with Collector() as collector:
        endpoint = collector.endpoint
    tracing = Tracing(endpoint)
    async with call_site(SETTINGS, tracing) as (stack, _):
        for _ in range(20):
            await stack.embed.Embed(EMBED)
    await asyncio.wait_for(closed(tracing), 2 * FLUSH_S)


async def test_without_tracing_a_log_line_has_the_ids_of_the_caller():
    with Log().kept() as log:
        async with call_site(SETTINGS) as (stack, _):
            await stack.embed.Embed(EMBED, metadata=SAMPLED)
            await stack.embed.Embed(EMBED, metadata=(("traceparent", "garbage"),))
    assert (log.calls[0]["trace_id"], log.calls[0]["span_id"]) == (TRACE, CALLER)
    assert "trace_id" not in log.calls[1]


@pytest.mark.parametrize(
    "header",
    [
        "",
        f"00-{TRACE}-{CALLER}",
        f"00-{'0' * 32}-{CALLER}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{CALLER}-01",
        f"00-{TRACE.upper()}-{CALLER}-01",
        f"00-{TRACE}-{CALLER}-01\n",
    ],
)
def test_headers_that_name_no_trace(header: str):
    assert parse_traceparent(header) == ("", "")


def test_when_there_is_tracing(caplog):
    assert open_tracing("", {}) is None
    variable = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}
    for off in ({"OTEL_SDK_DISABLED": "true"}, {"OTEL_TRACES_EXPORTER": "none"}):
        assert open_tracing("", variable | off) is None
    assert not caplog.records
    assert open_tracing("", variable | {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}) is None
    assert "not by http/protobuf" in caplog.text
    opened = open_tracing("", variable)
    assert opened is not None
    opened.close()


def test_without_the_packages_only_an_option_is_an_error(caplog, monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(TracingUnavailable, match=r"pyruntime\[otel\]"):
        open_tracing("http://127.0.0.1:9", {})
    assert open_tracing("", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}) is None
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
