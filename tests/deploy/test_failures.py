"""The table of failures in docs/operations.md: what can be made to happen is, and must look as the table says."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable

import grpc
import pytest

import server
from pyruntime.admission import Admission
from pyruntime.config import Settings
from pyruntime.errors import ComputeFault
from pyruntime.service.server_builder import build_server
from pyruntime.telemetry.catalog import METRICS
from pyruntime.v1 import embed_pb2, generate_pb2, model_pb2
from tests.deploy.replicas import ROOT
from tests.fakes import play
from tests.service.conftest import Failure, Stack, failure_of

TEXT = (ROOT / "docs/operations.md").read_text()
TABLE = TEXT.split("| what happens |")[1].split("\n\n")[0].splitlines()[2:]
ROWS = {cells[0]: cells[1:] for cells in ([cell.strip() for cell in line.strip("| ").split("|")] for line in TABLE)}
GENERATE = generate_pb2.GenerateRequest(model="decoder", text="hi")
EMBED = embed_pb2.EmbedRequest(model="decoder", inputs=[{"text": "a"}])


async def bad_field(stack: Stack) -> Failure:
    return await failure_of(stack.embed.Embed(embed_pb2.EmbedRequest(model="decoder")))


async def no_message(stack: Stack) -> Failure:
    return await failure_of(stack.channel.unary_unary("/pyruntime.v1.EmbedService/Embed")(b"\xff\xff\xff"))


async def unknown(stack: Stack) -> Failure:
    return await failure_of(stack.models.GetModel(model_pb2.GetModelRequest(model="nobody")))


async def incapable(stack: Stack) -> Failure:
    return await failure_of(stack.generate.Generate(generate_pb2.GenerateRequest(model="encoder", text="hi")))


async def not_loaded(stack: Stack) -> Failure:
    stack.registry.declare("torn")
    stack.registry.set_failed("torn", "weights are torn")
    return await failure_of(stack.generate.Generate(generate_pb2.GenerateRequest(model="torn", text="hi")))


async def loading(stack: Stack) -> Failure:
    stack.registry.declare("slow")
    return await failure_of(stack.generate.Generate(generate_pb2.GenerateRequest(model="slow", text="hi")))


async def full(stack: Stack) -> Failure:
    stack.engine.admission = Admission("decoder", max_requests=1, max_tokens=2**20)
    stack.engine.admit = stack.engine.admission.admit
    stack.engine.block = True
    first = asyncio.ensure_future(stack.embed.Embed(EMBED))
    await asyncio.wait_for(stack.engine.blocked.wait(), 10)
    failure = await failure_of(stack.embed.Embed(EMBED))
    first.cancel()
    return failure


async def late(stack: Stack) -> Failure:
    stack.engine.next_stream = play("never", per_wakeup=1)
    stack.engine.next_stream.hold = 1
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.generate.Generate(GENERATE, timeout=0.3)
    # The client's own clock may strike first, and then there are no details.
    return Failure(caught.value.code(), caught.value.details() or "", "DEADLINE_PASSED", {}, None)


async def a_step_raised(stack: Stack) -> Failure:
    stack.engine.refusal = ComputeFault("the forward failed")
    return await failure_of(stack.embed.Embed(EMBED))


async def a_defect(stack: Stack) -> Failure:
    stack.engine.refusal = KeyError("a secret")
    return await failure_of(stack.embed.Embed(EMBED))


async def shut_down(stack: Stack) -> Failure:
    stack.engine.next_stream = play("held", per_wakeup=1)
    stack.engine.next_stream.hold = 1
    running = aiter(stack.generate.GenerateStream(GENERATE))
    await anext(running)
    drain = asyncio.create_task(stack.server.drain(10))
    while not stack.registry.is_draining:
        await asyncio.sleep(0)
    failure = await failure_of(stack.embed.Embed(EMBED))
    stack.engine.next_stream.stopped.set()
    assert [chunk async for chunk in running][-1].finish_reason
    await drain
    return failure


async def out_of_grace(stack: Stack) -> Failure:
    stack.engine.next_stream = play("held", per_wakeup=1)
    stack.engine.next_stream.hold = 1
    running = stack.generate.GenerateStream(GENERATE)
    assert await running.read()
    drain = asyncio.create_task(stack.server.drain(0.1))
    failure = await failure_of(running)
    await drain
    return failure


CASES: dict[str, Callable[[Stack], Awaitable[Failure]]] = {
    "bad field, empty input, too long": bad_field,
    "bytes that are no message": no_message,
    "unknown model": unknown,
    "the model cannot do it": incapable,
    "a model could not be loaded": not_loaded,
    "a model is still loading": loading,
    "queue full": full,
    "a deadline passes, or cannot be met": late,
    "a step raises": a_step_raised,
    "a defect of the service": a_defect,
    "SIGTERM": shut_down,
    "calls outlast the grace": out_of_grace,
}


@pytest.mark.parametrize("happening", CASES)
async def test_the_client_sees_what_the_table_says(happening: str, stack: Stack, caplog: pytest.LogCaptureFixture):
    status, reason, log, *_ = ROWS[happening]
    failure = await CASES[happening](stack)
    assert failure.code.name in status
    assert failure.reason == reason
    told = re.search(r"RetryInfo(?: (\d+) s)?", status)
    assert (failure.retry_s is not None) == (told is not None)
    if told and told[1]:
        assert failure.retry_s == float(told[1])
    if happening in ("a defect of the service", "calls outlast the grace"):
        shape = re.escape(log.strip("`")).replace("N\\ ", r"\d+\ ").replace("…", r"[\d.]+")
        assert re.search(shape, caplog.text)
    assert "a secret" not in failure.message


async def test_one_item_that_is_not_finite_fails_alone(stack: Stack):
    status, reason, *_ = ROWS["NaN or infinity in an answer"]
    request = embed_pb2.EmbedRequest(model="decoder", inputs=[{"text": "\0"}, {"text": "a"}])
    bad, good = (await stack.embed.Embed(request)).results
    assert bad.error.code == grpc.StatusCode.INTERNAL.value[0] and "INTERNAL" in status
    assert reason.encode() in bad.error.details[0].value
    assert len(good.dense.values) == 12


async def test_tokens(tmp_path, stack: Stack):
    status, reasons, *_ = ROWS["no bearer token, or a wrong one"]
    tokens = tmp_path / "tokens"
    tokens.write_text("a-token-that-is-long-enough-0123456789\n")
    server = build_server(stack.registry, Settings(port=0, token_file=str(tokens)))
    port = await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        ask = Stack(stack.registry, server, channel, stack.decoder, stack.encoder).models.ListModels
        for metadata in ((), (("authorization", "Bearer wrong"),)):
            failure = await failure_of(ask(model_pb2.ListModelsRequest(), metadata=metadata))
            assert failure.code.name in status
            assert failure.reason in reasons.split(", ")
    await server.drain(0)


def test_every_metric_and_option_that_the_guide_names_exists():
    metrics = {metric.name for metric in METRICS}
    named = set(re.findall(r"`(pyruntime_[a-z_]+)", TEXT))
    assert named and named <= metrics, named - metrics
    options = {"--" + name.replace("_", "-") for name in Settings.model_fields} | {"--model", "--config", "--help"}
    options |= {"--build-arg"}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", TEXT))
    assert named <= options | {f"--no-{each[2:]}" for each in options}, named - options


def test_every_log_line_of_the_table_is_written_somewhere():
    sources = "\n".join(path.read_text() for path in [ROOT / "server.py", *(ROOT / "pyruntime").rglob("*.py")])
    lines = [line for cells in ROWS.values() for line in re.findall("`([^`]+)`", cells[2])]
    assert len(lines) > 8
    for line in lines:
        for piece in re.split(r"\bN\b|NAME|…", line):
            assert piece.strip() in sources, line


def test_the_table_gives_the_exit_statuses_of_the_server():
    given = {name: int(re.search(r"exit (\d)", cells[3])[1]) for name, cells in ROWS.items() if "exit" in cells[3]}
    assert given == {
        "a model could not be loaded": server.FAILED,
        "a device is lost": server.DEVICE_LOST,
        "SIGTERM": server.OK,
        "calls outlast the grace": server.OK,
        "an address is taken": server.FAILED,
        "plaintext beyond loopback, a bad option": server.BAD_USAGE,
    }
