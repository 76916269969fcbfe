"""What stands behind and in front of AdminService in its tests: a loader that can be held, and an operator."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from pyruntime.config import Settings
from pyruntime.engine import EngineLoad
from pyruntime.errors import ModelLoadError
from pyruntime.lifecycle import ModelManager
from pyruntime.registry import ServedModel
from pyruntime.scheduler.load import SchedulerLoad
from pyruntime.types import Capability, Task
from pyruntime.v1 import admin_pb2, admin_pb2_grpc, model_pb2
from tests.fakes import FakeEngine, fake_model
from tests.service.conftest import Failure, Stack, failure_of


class AdminEngine(FakeEngine):
    """Also tells its load, and ends what it plays when it is closed."""

    closed = False

    def load(self) -> EngineLoad:
        amounts = [{task: start + place for place, task in enumerate(Task)} for start in (10, 20, 30, 40)]
        return EngineLoad(self.admission.num_open, 7, 250.0, 3, 0.5, SchedulerLoad(*amounts, 1, 5, 6, 4))

    def close(self) -> None:
        self.closed = True


class Loader:
    """In the place of ``pyruntime.serving``: the load of a held name waits until it is let go."""

    def __init__(self) -> None:
        self.held: dict[str, threading.Event] = {}
        self.begun: dict[str, threading.Event] = {}
        self.calls: list[tuple[str, str, Settings, int]] = []
        self.models: dict[str, ServedModel] = {}

    def hold(self, name: str) -> threading.Event:
        self.begun[name] = threading.Event()
        self.held[name] = threading.Event()
        return self.held[name]

    async def has_begun(self, name: str) -> None:
        assert await asyncio.to_thread(self.begun[name].wait, 10)

    def __call__(self, name: str, path: str, settings: Settings, progress: Any, num_sharing: int) -> ServedModel:
        self.calls.append((name, path, settings, num_sharing))
        if name in self.held:
            self.begun[name].set()
            assert self.held[name].wait(10)
        if "nowhere" in path:
            raise ModelLoadError(f"{path}: neither a model folder nor a .gguf file")
        model = fake_model(name, {Capability.GENERATE, Capability.EMBED})
        model.engine = AdminEngine(model.info)  # type: ignore[assignment]
        self.models[name] = model
        return model


class Operator:
    """What an operator does, at the server's admin address."""

    def __init__(self, stack: Stack, channel: grpc.aio.Channel, manager: ModelManager) -> None:
        self.stack = stack
        self.stub = admin_pb2_grpc.AdminServiceStub(channel)
        self.manager = manager

    def load(self, name: str, path: str = "/models/a", **options: Any) -> grpc.aio.UnaryUnaryCall:
        request = admin_pb2.LoadModelRequest(name=name, path=path, options=admin_pb2.LoadOptions(**options))
        return self.stub.LoadModel(request)

    def unload(self, name: str, grace_s: float | None = None) -> grpc.aio.UnaryUnaryCall:
        request = admin_pb2.UnloadModelRequest(name=name)
        if grace_s is not None:
            request.grace.FromNanoseconds(int(grace_s * 1e9))
        return self.stub.UnloadModel(request)

    async def statuses(self) -> dict[str, admin_pb2.ModelStatus]:
        answer = await self.stub.ListModelStates(admin_pb2.ListModelStatesRequest())
        return {each.name: each for each in answer.models}

    async def states(self) -> dict[str, str]:
        states = admin_pb2.ModelState.Name
        return {name: states(each.state).removeprefix("MODEL_STATE_") for name, each in (await self.statuses()).items()}

    async def until(self, name: str, state: str) -> None:
        for _ in range(1000):
            if (await self.states()).get(name) == state:
                return
            await asyncio.sleep(0.005)
        raise AssertionError(f"{name} does not become {state}: {await self.states()}")

    async def health(self, service: str) -> int:
        return (await self.stack.health.Check(health_pb2.HealthCheckRequest(service=service))).status

    async def get(self, name: str) -> Failure:
        return await failure_of(self.stack.models.GetModel(model_pb2.GetModelRequest(model=name)))
