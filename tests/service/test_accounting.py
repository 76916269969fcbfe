"""Every call is counted, named and logged, however early it ends: also one whose request never arrives."""

from __future__ import annotations

import asyncio
import base64
import itertools
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2

from pyruntime.service.server_builder import RuntimeServer
from pyruntime.telemetry.logs import keep_paths_out
from pyruntime.v1 import generate_pb2, model_pb2
from tests.fake_compute import until
from tests.service.bad_requests import score
from tests.service.call_site import Log
from tests.service.conftest import SETTINGS, Stack, failure_of
from tests.service.transport import GENERATE, LIST_MODELS, STREAM, Answer, RawClient, frame, settings, stack_of

CHECK = "/grpc.health.v1.Health/Check"
WATCH = "/grpc.health.v1.Health/Watch"
GOOD = frame(generate_pb2.GenerateRequest(model="decoder", text="hi", request_id="by-field").SerializeToString())


@pytest.fixture
async def site() -> AsyncIterator[Stack]:
    async with stack_of(settings(client_stall_s=0.06)) as stack:
        yield stack


def opened(port: int, *names: str, data: bytes = b"") -> list[Answer]:
    """Calls of such names on one connection, of which no request arrives; how each is ended."""
    with RawClient(port) as client:
        paths = itertools.cycle([GENERATE, STREAM])
        streams = [client.open(next(paths), [("x-request-id", name)]) for name in names]
        for stream in streams:
            client.send(stream, data, end=False)
        return [client.finish(stream) for stream in streams]


def name_in_details(answer: Answer) -> str:
    raw = answer.headers["grpc-status-details-bin"]
    for detail in status_pb2.Status.FromString(base64.b64decode(raw + "=" * (-len(raw) % 4))).details:
        info = error_details_pb2.RequestInfo()
        if detail.Unpack(info):
            return info.request_id
    raise AssertionError("no RequestInfo")


def counted(server: RuntimeServer) -> dict[tuple[str, str], int]:
    """Calls by the last part of their method, and code."""
    return {(method.rpartition("/")[2], code): count for (method, code), count in server.calls.ended.items()}


async def test_requests_that_do_not_arrive_are_counted_each_under_its_own_name(site):
    with Log().kept() as log:
        answers = await asyncio.to_thread(opened, site.server.port, "first", "second", data=GOOD[:7])
        await until(lambda: len(log.calls) == 2)
    for name, answer in zip(["first", "second"], answers, strict=True):
        assert answer.code == grpc.StatusCode.CANCELLED.value[0]
        assert answer.headers["x-request-id"] == name_in_details(answer) == name
    lines = {line["request_id"]: (line["method"], line["code"], line["reason"]) for line in log.calls}
    service = "pyruntime.v1.GenerateService"
    assert lines == {
        "first": (f"{service}/Generate", "CANCELLED", "CLIENT_STALLED"),
        "second": (f"{service}/GenerateStream", "CANCELLED", "CLIENT_STALLED"),
    }
    assert counted(site.server) == {("Generate", "CANCELLED"): 1, ("GenerateStream", "CANCELLED"): 1}
    assert site.server.calls.reasons == {"CLIENT_STALLED": 2}
    assert set(site.server.calls.running.values()) == {0}


async def test_a_call_that_ends_without_a_request_is_counted(site):
    def work() -> Answer:
        with RawClient(site.server.port) as client:
            return client.call(GENERATE, b"", [("x-request-id", "mine")])

    with Log().kept() as log:
        answer = await asyncio.to_thread(work)
        await until(lambda: log.calls)
    assert answer.headers["x-request-id"] == name_in_details(answer) == "mine"
    (line,) = log.calls
    assert (line["code"], line["reason"], line["request_id"]) == ("INVALID_ARGUMENT", "MALFORMED_MESSAGE", "mine")
    assert counted(site.server) == {("Generate", "INVALID_ARGUMENT"): 1}


async def test_calls_that_are_given_up_before_their_request_is_whole_are_counted():
    async with stack_of(settings()) as site:

        def work() -> None:
            with RawClient(site.server.port) as client:
                streams = [client.open(path) for path in (GENERATE, STREAM, LIST_MODELS, CHECK)]
                for stream in streams:
                    client.send(stream, GOOD[:5], end=False)
                # Until the server has begun with them: it answers a later one.
                assert client.call(LIST_MODELS, frame(b"")).code == 0
                for stream in streams:
                    client.http.reset_stream(stream)
                client.flush()
                assert client.call(LIST_MODELS, frame(b"")).code == 0

        await asyncio.to_thread(work)
        await until(lambda: sum(site.server.calls.ended.values()) == 6)
        ended = counted(site.server)
        assert ended.pop(("ListModels", "OK")) == 2
        # Which of the two a server sees first, the reset or the end of what was sent, is not its choice.
        assert {method for method, _ in ended} == {"Generate", "GenerateStream", "ListModels", "Check"}
        assert {code for _, code in ended} <= {"CANCELLED", "INVALID_ARGUMENT"}
        assert set(site.server.calls.running.values()) == {0}


async def test_a_request_names_its_call_once_it_is_here(site):
    def work() -> Answer:
        with RawClient(site.server.port) as client:
            return client.call(GENERATE, GOOD)

    with Log().kept() as log:
        answer = await asyncio.to_thread(work)
        await until(lambda: log.calls)
    assert answer.headers["x-request-id"] == log.calls[0]["request_id"] == "by-field"


async def test_a_deadline_has_one_reason_whoever_sees_it_first():
    async with stack_of(settings()) as site:
        site.engine.block = True
        with pytest.raises(grpc.aio.AioRpcError):
            await site.score.Score(score(), timeout=0.3)
        await until(lambda: site.server.calls.ended)
        assert counted(site.server) == {("Score", "DEADLINE_EXCEEDED"): 1}
        assert site.server.calls.reasons == {"DEADLINE_PASSED": 1}


async def test_health_is_bounded_apart_from_calls():
    """Neither do streams of calls shut out probes, nor streams of health anything but themselves."""
    async with stack_of(settings(max_open_calls=2)) as site:
        held: list[Any] = [site.embed.EmbedStream() for _ in range(2)]
        for call in held:
            await call.wait_for_connection()
        held += [site.health.Watch(health_pb2.HealthCheckRequest()) for _ in range(2)]
        for watch in held[2:]:
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        failure = await failure_of(site.health.Watch(health_pb2.HealthCheckRequest()))
        assert (failure.code, failure.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")
        await until(lambda: site.server.calls.running["pyruntime.v1.EmbedService/EmbedStream"] == 2)
        failure = await failure_of(site.models.ListModels(model_pb2.ListModelsRequest()))
        assert failure.reason == "OVERLOADED"
        assert (await site.health.Check(health_pb2.HealthCheckRequest())).status == 1
        for call in held:
            call.cancel()


def assert_quoted_nowhere(log: Log) -> None:
    said = [line for line in log.lines if not line["logger"].startswith("hpack")]  # of the client in this process
    assert "Canary7311" not in str(said)
    assert "stack" not in str(said)


@pytest.mark.parametrize(
    "path", [b"/Canary7311\xff\xfe", GENERATE.encode() + b"\xff", b"/Canary7311\nb/c", b"\xc3\x28"]
)
async def test_a_path_that_is_no_text(site, path):
    """It ends its own call, or its connection; the server goes on."""
    keep_paths_out()

    def work() -> Answer:
        with RawClient(site.server.port) as client:
            return client.call(path, GOOD)

    with Log().kept() as log:
        answer = await asyncio.to_thread(work)
    assert answer.ended
    assert answer.code != 0
    assert_quoted_nowhere(log)
    assert len((await site.models.ListModels(model_pb2.ListModelsRequest(), timeout=10)).models) == 2


@pytest.mark.parametrize(
    ("told", "size", "metadata", "compression"),
    [
        ("RESOURCE_EXHAUSTED", 2 * SETTINGS.max_message_bytes, (), None),
        ("RESOURCE_EXHAUSTED", 10, (("x-long", "y" * 40_000),), None),
        ("UNIMPLEMENTED", 2000, (), grpc.Compression.Deflate),
    ],
)
async def test_what_grpcs_core_refuses_is_counted_too(site, told, size, metadata, compression):
    """As far as it can be seen: the core tells the client why, and the server that no request comes."""
    call = site.channel.unary_unary(GENERATE)
    for _ in range(5):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(bytes(size), metadata=metadata, compression=compression)
        assert caught.value.code().name == told
    await until(lambda: sum(site.server.calls.ended.values()) == 5 and not +site.server.calls.running)
    assert counted(site.server).keys() <= {("Generate", "CANCELLED"), ("Generate", "INVALID_ARGUMENT")}
    assert site.server.calls.reasons.keys() <= {"MALFORMED_MESSAGE"}


async def test_metadata_that_is_no_text_is_not_logged(site):
    def work() -> Answer:
        with RawClient(site.server.port) as client:
            headers: Any = [("x-other", b"Canary7311\xff"), ("traceparent", b"\xff"), ("x-request-id", b"\xfe")]
            return client.call(LIST_MODELS, frame(b""), headers)

    keep_paths_out()
    with Log().kept() as log:
        answer = await asyncio.to_thread(work)
    assert answer.ended
    assert_quoted_nowhere(log)
    assert len((await site.models.ListModels(model_pb2.ListModelsRequest(), timeout=10)).models) == 2


async def test_clients_that_go_before_their_answer_leave_no_stack_in_the_log(site, capfd):
    """Whatever the answer would have been: that of a method, an error of it, a refusal."""
    paths = [GENERATE, STREAM, LIST_MODELS, CHECK, "/x/y"]
    raw = health_pb2.HealthCheckRequest(service="none").SerializeToString()

    def work() -> None:
        for round_ in range(40):
            with RawClient(site.server.port) as client:
                for path in paths:
                    stream = client.open(path)
                    wire = frame(raw) if path == CHECK else frame(b"\xff" * 20)
                    client.http.send_data(stream, wire, end_stream=round_ % 2 == 0)
                    client.http.reset_stream(stream)
                client.flush()

    with Log().kept() as log:
        await asyncio.to_thread(work)
        await until(lambda: sum(site.server.calls.ended.values()) > 0 and not +site.server.calls.running)
        await site.models.ListModels(model_pb2.ListModelsRequest(), timeout=10)
    assert not [line for line in log.lines if "stack" in line]
    assert "Traceback" not in capfd.readouterr().err
