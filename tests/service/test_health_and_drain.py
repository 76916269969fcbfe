"""Health follows the registry; a drain tells first, then refuses, then waits."""

from __future__ import annotations

import asyncio
import contextlib

import grpc
import pytest
from grpc_health.v1 import health_pb2

from pyruntime.registry import ModelRegistry
from pyruntime.service import server_builder
from pyruntime.service.server_builder import build_server
from pyruntime.v1 import embed_pb2, generate_pb2, model_pb2
from tests.fake_compute import until
from tests.fakes import play
from tests.service.bad_requests import score
from tests.service.conftest import SETTINGS, Stack, failure_of
from tests.service.transport import RawClient, frame

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
GENERATE = "pyruntime.v1.GenerateService"
EMBED = "pyruntime.v1.EmbedService"
SERVICES = ("", GENERATE, EMBED, "pyruntime.v1.ScoreService", "pyruntime.v1.ModelService")


async def check(stack: Stack, service: str) -> int:
    return (await stack.health.Check(health_pb2.HealthCheckRequest(service=service))).status


class Watcher:
    """One Watch stream; ``next`` is its next state."""

    def __init__(self, stack: Stack, service: str) -> None:
        self._call = stack.health.Watch(health_pb2.HealthCheckRequest(service=service))

    async def next(self) -> int:
        return (await asyncio.wait_for(self._call.read(), 5)).status


async def test_nothing_serves_before_a_model_is_loaded(bare: Stack):
    bare.registry.declare("decoder")
    assert [await check(bare, service) for service in SERVICES] == [NOT_SERVING] * 5


async def test_watch_sees_each_transition(bare: Stack):
    overall, generate, embed = (Watcher(bare, service) for service in ("", GENERATE, EMBED))
    assert [await each.next() for each in (overall, generate, embed)] == [NOT_SERVING] * 3
    bare.registry.declare("encoder")
    bare.registry.declare("decoder")
    # From a thread of its own, as the loader does it.
    await asyncio.to_thread(bare.registry.set_serving, "encoder", bare.encoder)
    assert await embed.next() == SERVING
    assert await check(bare, GENERATE) == NOT_SERVING
    assert await check(bare, "") == NOT_SERVING  # one model is still loading
    await asyncio.to_thread(bare.registry.set_serving, "decoder", bare.decoder)
    assert await generate.next() == SERVING
    assert await overall.next() == SERVING
    drain = asyncio.create_task(bare.server.drain(5))
    assert [await each.next() for each in (overall, generate, embed)] == [NOT_SERVING] * 3
    await drain


async def test_a_model_that_fails_does_not_hold_up_the_others(bare: Stack):
    bare.registry.declare("decoder")
    bare.registry.declare("broken")
    watcher = Watcher(bare, "")
    assert await watcher.next() == NOT_SERVING
    bare.registry.set_serving("decoder", bare.decoder)
    bare.registry.set_failed("broken", "torn")
    assert await watcher.next() == SERVING


async def test_unknown_service(stack: Stack):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await check(stack, "nobody")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_drain_lets_running_requests_end(stack: Stack):
    stream = play("abc")
    stream.hold = 2
    stack.engine.next_stream = stream
    call = stack.generate.GenerateStream(generate_pb2.GenerateRequest(text="x"))
    assert (await call.read()).text == "a"
    watcher = Watcher(stack, "")
    assert await watcher.next() == SERVING
    drain = asyncio.create_task(stack.server.drain(20))
    assert await watcher.next() == NOT_SERVING
    failure = await failure_of(stack.models.GetModel(model_pb2.GetModelRequest(model="decoder")))
    assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, "NOT_READY")
    assert failure.retry_s > 0
    assert not drain.done()
    stream.stopped.set()  # the engine goes on
    assert [(await call.read()).text for _ in range(2)] == ["b", "c"]
    assert await call.read() is grpc.aio.EOF
    await asyncio.wait_for(drain, 10)


async def test_drain_ends_what_runs_past_its_grace(stack: Stack):
    stream = play("abc")
    stream.hold = 1
    stack.engine.next_stream = stream
    call = stack.generate.GenerateStream(generate_pb2.GenerateRequest(text="x"))
    assert (await call.read()).text == "a"
    stack.engine.block = True
    unary = asyncio.create_task(failure_of(stack.score.Score(score())))
    await asyncio.wait_for(stack.engine.blocked.wait(), 5)
    await asyncio.wait_for(stack.server.drain(0.05), 10)
    assert stream.stopped.is_set()
    assert stack.engine.unblocked.is_set()
    for failure in (await failure_of(call), await unary):
        assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, "NOT_READY")
        assert failure.message == "the server is shutting down"
        assert failure.retry_s > 0


async def test_a_taken_port_is_an_error(stack: Stack):
    second = build_server(ModelRegistry(), SETTINGS.model_copy(update={"port": stack.server.port}))
    with pytest.raises(RuntimeError):
        await second.start()
    await second.drain(0)


async def test_readiness_says_what_overall_health_says(stack: Stack):
    """At every moment of a drain: from the first one on, before anything else of it has happened."""
    assert stack.server.is_ready
    said = []
    stack.registry.add_listener(lambda: said.append((stack.registry.is_draining, stack.server.is_ready)))
    await stack.server.drain(0)
    assert said == [(True, False)]
    assert not stack.server.is_ready


async def test_a_watcher_that_ends_takes_nothing_from_the_others(stack: Stack):
    first, second = Watcher(stack, ""), Watcher(stack, "")
    assert [await first.next(), await second.next()] == [SERVING, SERVING]
    first._call.cancel()
    await until(lambda: stack.server.calls.running["grpc.health.v1.Health/Watch"] == 1)
    stack.registry.set_failed("decoder", "torn")
    stack.registry.set_failed("encoder", "torn")
    assert await second.next() == NOT_SERVING


async def test_a_watcher_that_does_not_read_holds_nobody_up(stack: Stack):
    """Its window is shut from the start, so that not even the first state can be sent."""

    def open_watch() -> RawClient:
        client = RawClient(stack.server.port, window=0)
        client.send(client.open("/grpc.health.v1.Health/Watch"), frame(b""))
        return client

    silent = await asyncio.to_thread(open_watch)
    await until(lambda: stack.server.calls.running["grpc.health.v1.Health/Watch"] == 1)
    watcher = Watcher(stack, "")
    assert await watcher.next() == SERVING
    news = asyncio.create_task(watcher.next())
    await asyncio.wait_for(stack.server.drain(0.1), 10)
    assert await news == NOT_SERVING
    silent.socket.close()


async def test_calls_that_arrive_as_the_port_closes_are_told_to_come_back(stack: Stack):
    """Each caller calls until it is refused once: while calls come the port stays open, so that none is reset."""

    answered = [asyncio.Event() for _ in range(20)]

    async def until_refused(one: asyncio.Event) -> grpc.aio.AioRpcError:
        try:
            while True:
                await stack.embed.Embed(embed_pb2.EmbedRequest(model="decoder", inputs=[{"text": "a"}]))
                one.set()
        except grpc.aio.AioRpcError as error:
            return error

    callers = [asyncio.create_task(until_refused(one)) for one in answered]
    await asyncio.wait_for(asyncio.gather(*(one.wait() for one in answered)), 20)
    await asyncio.wait_for(asyncio.gather(stack.server.drain(20), *callers), 20)
    errors = [caller.result() for caller in callers]
    assert {error.code() for error in errors} == {grpc.StatusCode.UNAVAILABLE}
    assert all("grpc-retry-pushback-ms" in dict(error.trailing_metadata() or ()) for error in errors), errors


@pytest.mark.parametrize(("grace_s", "linger_s"), [(0.1, 1000.0), (1000.0, 0.1)])
async def test_calls_that_go_on_coming_do_not_hold_a_drain_up(stack: Stack, monkeypatch, grace_s, linger_s):
    monkeypatch.setattr(server_builder, "LINGER_S", linger_s)

    called = asyncio.Semaphore(0)

    async def call_for_ever() -> None:
        while True:
            called.release()
            with contextlib.suppress(grpc.aio.AioRpcError):
                await stack.embed.Embed(embed_pb2.EmbedRequest(model="decoder", inputs=[{"text": "a"}]))

    callers = [asyncio.create_task(call_for_ever()) for _ in range(4)]
    try:
        for _ in range(20):
            await called.acquire()
        await asyncio.wait_for(stack.server.drain(grace_s), 20)
    finally:
        for caller in callers:
            caller.cancel()
