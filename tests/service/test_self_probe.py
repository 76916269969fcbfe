"""An engine that does not come round takes its model, and the server, out of rotation, and back when it does."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator
from types import SimpleNamespace

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import server
from pyruntime.config import Settings
from pyruntime.registry import ModelRegistry
from pyruntime.service.self_probe import SelfProbe
from pyruntime.types import Capability
from pyruntime.v1 import generate_pb2_grpc
from tests.fake_compute import until
from tests.fakes import FakeEngine, fake_model
from tests.service.test_flow import Site, request

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
GENERATE = "pyruntime.v1.GenerateService"


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    made = Site()
    made.settings = Settings(port=0, step_stall_s=1.0)
    await made.start()
    yield made
    made.let_go()
    await made.server.drain(0)
    await asyncio.to_thread(made.engine.close)


async def test_a_step_that_hangs_is_seen_and_so_is_its_end(site):
    async with site.channel() as channel:
        health, stub = health_pb2_grpc.HealthStub(channel), generate_pb2_grpc.GenerateServiceStub(channel)
        names = ("", GENERATE, "model/m")
        watches = [health.Watch(health_pb2.HealthCheckRequest(service=name)) for name in names]
        alive = health.Watch(health_pb2.HealthCheckRequest(service="liveness"))
        assert [(await watch.read()).status for watch in (*watches, alive)] == [SERVING] * 4
        site.model.hold = True
        call = stub.Generate(request(1))
        assert [(await asyncio.wait_for(watch.read(), 10)).status for watch in watches] == [NOT_SERVING] * 3
        assert not site.server.is_ready
        for name, status in (("", NOT_SERVING), ("pyruntime.v1.EmbedService", NOT_SERVING), ("liveness", SERVING)):
            assert (await health.Check(health_pb2.HealthCheckRequest(service=name))).status == status
        site.let_go()
        assert [(await asyncio.wait_for(watch.read(), 10)).status for watch in watches] == [SERVING] * 3
        assert (await call).completions[0].text == "a"
        assert site.server.is_ready
        # Liveness has not moved in all that time, and does not while the server drains.
        drain = asyncio.create_task(site.server.drain(5))
        assert (await asyncio.wait_for(watches[0].read(), 10)).status == NOT_SERVING
        with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
            while await asyncio.wait_for(alive.read(), 10) is not grpc.aio.EOF:
                raise AssertionError("liveness has changed")
            raise asyncio.CancelledError
        await drain


async def test_liveness_needs_no_model():
    site = Site()
    site.registry.drain()
    await site.start()
    async with site.channel() as channel:
        health = health_pb2_grpc.HealthStub(channel)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == NOT_SERVING
        assert (await health.Check(health_pb2.HealthCheckRequest(service="liveness"))).status == SERVING
    await site.server.drain(0)
    await asyncio.to_thread(site.engine.close)


class Deaf(FakeEngine):
    """Answers when it is told to."""

    def __init__(self, info) -> None:
        super().__init__(info)
        self.asked = []

    def probe(self, answer) -> None:
        self.asked.append(answer)


async def test_a_server_with_an_engine_that_hangs_still_ends(monkeypatch):
    """It must not wait for the engine's thread, and its exit status tells."""
    deaf = fake_model("m", {Capability.EMBED})
    deaf.engine = Deaf(deaf.info)
    deaf.release = lambda: pytest.fail("the engine was to be joined")
    monkeypatch.setitem(sys.modules, "pyruntime.serving", SimpleNamespace(load_served_model=lambda *_: deaf))
    built, build = [], server.build_server
    monkeypatch.setattr(server, "build_server", lambda *given: built.append(build(*given)) or built[0])
    running = asyncio.create_task(server.serve(Settings(models={"m": "a"}, port=0, step_stall_s=0.05)))
    await until(lambda: built and built[0].has_stalled)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(running, 20) == server.DEVICE_LOST


def test_the_rules(caplog):
    caplog.set_level(logging.WARNING)
    registry, changes = ModelRegistry(), []
    models = {name: fake_model(name, {Capability.EMBED}) for name in ("a", "b")}
    for name, model in models.items():
        model.engine = Deaf(model.info)
        registry.declare(name)
        registry.set_serving(name, model)
    probe = SelfProbe(registry, 10, lambda: changes.append(probe.stalled))
    probe.look(0)
    probe.look(10)
    assert probe.stalled == frozenset()
    assert [len(model.engine.asked) for model in models.values()] == [1, 1]  # not asked again meanwhile
    models["b"].engine.asked[0]()
    probe.look(11)
    probe.look(12)
    assert changes == [{"a"}]  # told once
    models["a"].engine.asked[0]()
    probe.look(13)
    assert changes == [{"a"}, frozenset()]
    probe.look(24)
    assert probe.stalled == {"a", "b"}
    registry.set_failed("a", "broken")
    registry.remove("b")
    probe.look(25)
    assert probe.stalled == frozenset()
    assert caplog.text.count("has not answered for 10 s") == 3


def test_a_model_that_comes_again_under_its_name_is_another():
    registry = ModelRegistry()
    probe = SelfProbe(registry, 10, lambda: None)
    for _ in range(2):
        model = fake_model("a", {Capability.EMBED})
        model.engine = Deaf(model.info)
        registry.declare("a")
        registry.set_serving("a", model)
        probe.look(0 if model.engine.asked else 5)
        registry.remove("a")
    registry.declare("a")
    registry.set_serving("a", model)
    probe.look(14)
    assert probe.stalled == frozenset()
