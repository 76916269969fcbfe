"""grpc.health.v1: follows the registry, overall, for each service and for each model."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pyruntime.registry import ModelRegistry
from pyruntime.service.self_probe import SelfProbe
from pyruntime.types import Capability

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
# By service.
Health = dict[str, health_pb2.HealthCheckResponse.ServingStatus]
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


def health_of(registry: ModelRegistry, stalled: frozenset[str] = frozenset()) -> Health:
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


class HealthServicer(health_pb2_grpc.HealthServicer):
    """What is published of each service, to those who ask and to those who watch. For one event loop.

    Not the one of grpcio-health-checking: there a watcher that ends takes the news from all others of its service, and
    one that does not read holds up whoever has news, a drain included.

    LIVENESS is SERVING from the first moment to the last: whoever gets an answer knows that the event loop runs.
    """

    def __init__(self) -> None:
        self._health: Health = {}
        self._changed = asyncio.Event()  # another one after each change

    @property
    def known(self) -> list[str]:
        return list(self._health)

    def publish(self, health: Health) -> None:
        """Of all services; names that are not in it are unknown from now on."""
        if health != self._health:
            self._health = health
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        status = self._status(request.service)
        if status == UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        said = None
        while True:
            changed, status = self._changed, self._status(request.service)
            if status != said:
                yield health_pb2.HealthCheckResponse(status=status)
                said = status
            await changed.wait()

    def _status(self, service: str) -> health_pb2.HealthCheckResponse.ServingStatus:
        return SERVING if service == LIVENESS else self._health.get(service, UNKNOWN)


class HealthFollower:
    """Keeps a health servicer in step with the registry and the engines. Make and start it on the server's event loop.

    ``step_stall_s``: how long an engine may stay silent, as in ``SelfProbe``.
    """

    def __init__(self, registry: ModelRegistry, step_stall_s: float = 0.0) -> None:
        self.servicer = HealthServicer()
        self._registry = registry
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._probe = SelfProbe(registry, step_stall_s, self._changed.set)
        self._tasks: list[asyncio.Task[None]] = []
        self.is_ready = False  # what overall health says

    def start(self) -> None:
        """Publish the present state, then every change."""
        self._registry.add_listener(self._wake)
        self._publish()
        jobs = {"health": self._follow(), "self-probe": self._probe.run()}
        self._tasks = [asyncio.create_task(job, name=name) for name, job in jobs.items()]

    @property
    def has_stalled(self) -> bool:
        """Some engine has not answered the last question for too long."""
        return bool(self._probe.stalled)

    def shut_down(self) -> None:
        """NOT_SERVING for all, for good."""
        self.is_ready = False
        self.servicer.publish(dict.fromkeys(self.servicer.known, NOT_SERVING))
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
            self._publish()

    def _publish(self) -> None:
        health = health_of(self._registry, self._probe.stalled)
        self.is_ready = health[OVERALL] == SERVING
        self.servicer.publish(health)
