"""SIGTERM to a busy server, and the price of idle clients, in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import socket
from collections.abc import AsyncIterator, Iterator

import grpc
import h2.connection
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pyruntime.v1 import admin_pb2, admin_pb2_grpc, embed_pb2_grpc, generate_pb2_grpc, model_pb2, model_pb2_grpc
from tests.service.conftest import failure_of
from tests.service.paced_server import MOST_AT_ONCE, Running, running
from tests.service.test_flow import alphabet, request, text_of

NUM_QUEUED = 10
COUNT = 150
IDLE = 1000
IDLE_BYTES = 50 * 10**6


@pytest.fixture
def site() -> Iterator[Running]:
    with running() as made:
        yield made


@pytest.fixture
async def channel(site: Running) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(site.address) as made:
        yield made


async def until_queued(site: Running) -> None:
    async with grpc.aio.insecure_channel(site.admin) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        waiting = 0
        while waiting < NUM_QUEUED:
            (model,) = (await stub.ListModelStates(admin_pb2.ListModelStatesRequest())).models
            waiting = sum(task.waiting_sequences for task in model.load.tasks)


async def test_sigterm_loses_no_stream_that_runs_and_sends_the_queued_away(site, channel):
    stub = generate_pb2_grpc.GenerateServiceStub(channel)
    watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    streams = [stub.GenerateStream(request(COUNT)) for _ in range(MOST_AT_ONCE)]
    first = [(await stream.read()).text for stream in streams]
    queued = [stub.GenerateStream(request(COUNT)) for _ in range(NUM_QUEUED // 2)]
    queued += [stub.Generate(request(COUNT)) for _ in range(NUM_QUEUED // 2)]
    await asyncio.wait_for(until_queued(site), 20)
    site.process.send_signal(signal.SIGTERM)
    assert (await asyncio.wait_for(watch.read(), 20)).status == health_pb2.HealthCheckResponse.NOT_SERVING
    new = model_pb2_grpc.ModelServiceStub(channel).GetModel(model_pb2.GetModelRequest(model="m"))
    for call in (*queued, new):
        failure = await failure_of(call)
        assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, "NOT_READY")
        assert failure.retry_s > 0
    rest = await asyncio.gather(*map(text_of, streams))
    assert [begin + end for begin, end in zip(first, rest, strict=True)] == [alphabet(COUNT)] * MOST_AT_ONCE
    assert await asyncio.to_thread(site.process.wait, 20) == 0


async def settled(process: psutil.Process) -> int:
    """Its memory once that has stopped to grow."""
    before, now = 0, process.memory_info().rss
    while now > before:
        await asyncio.sleep(0.2)
        before, now = now, process.memory_info().rss
    return now


async def test_a_thousand_idle_streams_cost_little():
    with running("--max-open-calls", str(IDLE)) as site:
        async with grpc.aio.insecure_channel(site.address) as channel:
            models, process = model_pb2_grpc.ModelServiceStub(channel), psutil.Process(site.process.pid)
            await models.ListModels(model_pb2.ListModelsRequest())
            before = await settled(process)
            streams = [embed_pb2_grpc.EmbedServiceStub(channel).EmbedStream() for _ in range(IDLE)]
            code = grpc.StatusCode.OK
            while code is grpc.StatusCode.OK:  # until the server has seen them all
                code = await models.ListModels(model_pb2.ListModelsRequest()).code()
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert (await settled(process)) - before < IDLE_BYTES
            for stream in streams:
                stream.cancel()
            while code is grpc.StatusCode.RESOURCE_EXHAUSTED:
                code = await models.ListModels(model_pb2.ListModelsRequest()).code()
            assert code is grpc.StatusCode.OK


async def test_a_thousand_idle_connections_cost_little(site, channel):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2 * IDLE:
        pytest.skip(f"this process may have {hard} files open")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * IDLE), hard))
    process = psutil.Process(site.process.pid)
    assert await text_of(generate_pb2_grpc.GenerateServiceStub(channel).GenerateStream(request(5))) == alphabet(5)
    before = await settled(process)
    with contextlib.ExitStack() as stack:
        await asyncio.to_thread(connect, site.address, stack)
        assert (await settled(process)) - before < IDLE_BYTES
        assert await text_of(generate_pb2_grpc.GenerateServiceStub(channel).GenerateStream(request(5))) == alphabet(5)


def connect(address: str, stack: contextlib.ExitStack) -> None:
    """A thousand connections that have shaken hands."""
    host, _, port = address.rpartition(":")
    for _ in range(IDLE):
        raw = stack.enter_context(socket.create_connection((host, int(port))))
        raw.settimeout(20)
        http = h2.connection.H2Connection()
        http.initiate_connection()
        raw.sendall(http.data_to_send())
        http.receive_data(raw.recv(65536))
        raw.sendall(http.data_to_send())


@pytest.mark.slow
async def test_ten_thousand_connects_a_minute(site, channel):
    """And as many that say nothing are let go; a call beside them is answered throughout."""
    host, _, port = site.address.rpartition(":")
    process = psutil.Process(site.process.pid)
    stub = generate_pb2_grpc.GenerateServiceStub(channel)

    def attack() -> None:
        for number in range(10_000):
            with socket.create_connection((host, int(port))) as raw:
                if number % 3 == 0:
                    raw.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")

    await text_of(stub.GenerateStream(request(5)))
    before = await settled(process)
    attacking = asyncio.create_task(asyncio.to_thread(attack))
    while not attacking.done():
        assert await text_of(stub.GenerateStream(request(5))) == alphabet(5)
    await attacking
    assert (await settled(process)) - before < IDLE_BYTES
