"""grpc.health.v1: follows the registry, overall, for each service and for each model."""

from __future__ import annotations

import asyncio
import contextlib

import grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1._async import HealthServicer

from pyruntime.registry import ModelRegistry, ModelState
from pyruntime.types import Capability

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
OVERALL = ""
# With a model's name behind it, the health of that model.
MODEL = "model/"
# None: any model will do.
NEEDS: dict[str, Capability | None] = {
    "pyruntime.v1.GenerateService": Capability.GENERATE,
    "pyruntime.v1.EmbedService": Capability.EMBED,
    "pyruntime.v1.ScoreService": Capability.SCORE,
    "pyruntime.v1.ModelService": None,
}


def health_of(registry: ModelRegistry) -> dict[str, health_pb2.HealthCheckResponse.ServingStatus]:
    """A service is SERVING once a model can answer it; overall once some model serves and none of the start is loading.

    A model that is loaded later changes the overall health of a server that serves already neither way.
    """
    models = [] if registry.is_draining else registry.serving()
    able = {
        service: any(capability is None or capability in model.info.capabilities for model in models)
        for service, capability in NEEDS.items()
    }
    able[OVERALL] = bool(models) and not registry.is_starting
    for model in registry.statuses():
        able[MODEL + model.name] = model.state is ModelState.SERVING and not registry.is_draining
    return {service: SERVING if yes else NOT_SERVING for service, yes in able.items()}


class _Servicer(HealthServicer):
    """For a Check too, a name that is gone is one that was never there."""

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        response = await super().Check(request, context)
        if response is not None and response.status == UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return response


class HealthFollower:
    """Keeps a health servicer in step with the registry. Make and start it on the server's event loop."""

    def __init__(self, registry: ModelRegistry) -> None:
        self.servicer = _Servicer()
        self._registry = registry
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._published: set[str] = set()

    async def start(self) -> None:
        """Publish the present state, then every change."""
        self._registry.add_listener(self._wake)
        await self._publish()
        self._task = asyncio.create_task(self._follow(), name="health")

    async def shut_down(self) -> None:
        """NOT_SERVING for all, for good."""
        await self.servicer.enter_graceful_shutdown()
        self._registry.remove_listener(self._wake)
        if self._task is not None:
            self._task.cancel()

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody asks any more
            self._loop.call_soon_threadsafe(self._changed.set)

    async def _follow(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self._publish()

    async def _publish(self) -> None:
        health = health_of(self._registry)
        for gone in self._published - health.keys():
            await self.servicer.set(gone, UNKNOWN)
        self._published = set(health)
        for service, status in health.items():
            await self.servicer.set(service, status)
