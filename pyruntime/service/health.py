"""grpc.health.v1: follows the registry, overall, for each service and for each model."""

from __future__ import annotations

import asyncio
import contextlib

import grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1._async import HealthServicer

from pyruntime.registry import ModelRegistry
from pyruntime.service.self_probe import SelfProbe
from pyruntime.types import Capability

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
OVERALL = ""
LIVENESS = "liveness"
# With a model's name behind it, the health of that model.
MODEL = "model/"
# None: any model will do.
NEEDS: dict[str, Capability | None] = {
    "pyruntime.v1.GenerateService": Capability.GENERATE,
    "pyruntime.v1.EmbedService": Capability.EMBED,
    "pyruntime.v1.ScoreService": Capability.SCORE,
    "pyruntime.v1.ModelService": None,
}


def health_of(
    registry: ModelRegistry, stalled: frozenset[str] = frozenset()
) -> dict[str, health_pb2.HealthCheckResponse.ServingStatus]:
    """A service is SERVING once a model can answer it; overall once some model serves and none of the start is loading.

    A model that is loaded later changes the overall health of a server that serves already neither way. Of the models
    whose engines are ``stalled`` none is healthy, nor then is the server as a whole: the others share their device.
    """
    models = [] if registry.is_draining else [each for each in registry.serving() if each.info.name not in stalled]
    able = {
        service: any(capability is None or capability in model.info.capabilities for model in models)
        for service, capability in NEEDS.items()
    }
    able[OVERALL] = bool(models) and not stalled and not registry.is_starting
    serving = {model.info.name for model in models}
    for status in registry.statuses():
        able[MODEL + status.name] = status.name in serving
    return {service: SERVING if yes else NOT_SERVING for service, yes in able.items()}


class _Servicer(HealthServicer):
    """For a Check too, a name that is gone is one that was never there.

    LIVENESS is SERVING from the first moment to the last: whoever gets an answer knows that the event loop runs.
    """

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        if request.service == LIVENESS:
            return health_pb2.HealthCheckResponse(status=SERVING)
        response = await super().Check(request, context)
        if response is not None and response.status == UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return response

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext) -> None:
        if request.service != LIVENESS:
            await super().Watch(request, context)
            return
        await context.write(health_pb2.HealthCheckResponse(status=SERVING))
        await asyncio.Event().wait()  # until the client or the server ends


class HealthFollower:
    """Keeps a health servicer in step with the registry and the engines. Make and start it on the server's event loop.

    ``step_stall_s``: how long an engine may stay silent, as in ``SelfProbe``.
    """

    def __init__(self, registry: ModelRegistry, step_stall_s: float = 0.0) -> None:
        self.servicer = _Servicer()
        self._registry = registry
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._probe = SelfProbe(registry, step_stall_s, self._changed.set)
        self._tasks: list[asyncio.Task[None]] = []
        self._published: set[str] = set()

    async def start(self) -> None:
        """Publish the present state, then every change."""
        self._registry.add_listener(self._wake)
        await self._publish()
        jobs = {"health": self._follow(), "self-probe": self._probe.run()}
        self._tasks = [asyncio.create_task(job, name=name) for name, job in jobs.items()]

    @property
    def is_ready(self) -> bool:
        """What overall health says."""
        return health_of(self._registry, self._probe.stalled)[OVERALL] == SERVING

    @property
    def has_stalled(self) -> bool:
        """Some engine has not answered the last question for too long."""
        return bool(self._probe.stalled)

    async def shut_down(self) -> None:
        """NOT_SERVING for all, for good."""
        await self.servicer.enter_graceful_shutdown()
        self._registry.remove_listener(self._wake)
        for task in self._tasks:
            task.cancel()

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody asks any more
            self._loop.call_soon_threadsafe(self._changed.set)

    async def _follow(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self._publish()

    async def _publish(self) -> None:
        health = health_of(self._registry, self._probe.stalled)
        for gone in self._published - health.keys():
            await self.servicer.set(gone, UNKNOWN)
        self._published = set(health)
        for service, status in health.items():
            await self.servicer.set(service, status)
