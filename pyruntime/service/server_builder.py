"""All servicers on one grpc.aio server, the operator's on another, and their orderly end."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pyruntime.config import Settings
from pyruntime.lifecycle import ModelManager
from pyruntime.registry import ModelRegistry, shutting_down
from pyruntime.service.admin import AdminServicer
from pyruntime.service.authorization import token_interceptors
from pyruntime.service.calls import CallInterceptor
from pyruntime.service.embed import EmbedServicer
from pyruntime.service.generate import GenerateServicer
from pyruntime.service.health import HealthFollower
from pyruntime.service.interceptor import ErrorInterceptor
from pyruntime.service.listeners import (
    channel_options,
    compression,
    grpcurl_flags,
    is_unix,
    listen,
    main_address,
    refuse_open_plaintext,
    warn_of_open_doors,
)
from pyruntime.service.model import ModelServicer
from pyruntime.service.reflection import add_reflection
from pyruntime.service.room import ServiceRoom
from pyruntime.service.score import ScoreServicer
from pyruntime.service.tls import TlsFiles, tls_files
from pyruntime.telemetry.calls import CallStats
from pyruntime.telemetry.tracing import Tracing
from pyruntime.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    embed_pb2,
    embed_pb2_grpc,
    generate_pb2,
    generate_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    score_pb2,
    score_pb2_grpc,
)

log = logging.getLogger(__name__)

# After its grace a drain ends the calls that still run; they get this long to notice.
CANCEL_S = 1.0
# Closing resets calls that are on their way. So a server that drains goes on turning calls away until none has come for
# QUIET_S, LINGER_S at most: by then a balancer that asks for its health every 2 s has left it out.
QUIET_S, LINGER_S = 0.5, 5.0
MODEL_FILES = (generate_pb2, embed_pb2, score_pb2, model_pb2)


class AdminServer:
    """AdminService at an address of its own, which clients of the models do not get to."""

    def __init__(
        self,
        registry: ModelRegistry,
        manager: ModelManager,
        settings: Settings,
        around: CallInterceptor,
        tls: TlsFiles | None,
    ) -> None:
        self.address = settings.admin_address
        self._credentials = tls.credentials() if tls is not None else None
        self._interceptor = _error_interceptor(settings)
        tokens = token_interceptors("--admin-token-file", settings.admin_token_file, _methods(admin_pb2), settings)
        self._server = _server([around, *tokens, self._interceptor], settings)
        servicer = AdminServicer(registry, manager, settings)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(servicer, self._server)
        if settings.reflection != "off":
            add_reflection(self._server, _service_names(admin_pb2))

    async def start(self) -> None:
        """Listen, and make ``address`` what clients connect to. Raises RuntimeError when the address cannot be had."""
        self.address = listen(self._server, self.address, self._credentials, access="owner")
        await self._server.start()

    async def stop(self) -> None:
        """End the calls that wait for a load or an unload; their clients are told UNAVAILABLE."""
        self._interceptor.evict()
        await self._interceptor.wait_idle(CANCEL_S)
        await self._server.stop(CANCEL_S)


class RuntimeServer:
    """The gRPC face of a registry. Make it on the event loop that runs it.

    ``manager``: who loads for AdminService, which is served when there is one and the settings have an admin address.
    ``tracing``: where spans of calls go; None makes none. Raises ``UnsafeTransport`` when certificates or tokens cannot
    be used, or others could listen in.
    """

    def __init__(
        self,
        registry: ModelRegistry,
        settings: Settings,
        manager: ModelManager | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self._registry = registry
        self._settings = settings
        refuse_open_plaintext(settings)
        warn_of_open_doors(settings)
        tls = tls_files(settings)
        self._credentials = tls.credentials() if tls is not None else None
        self._interceptor = _error_interceptor(settings)
        tokens = token_interceptors("--token-file", settings.token_file, _methods(*MODEL_FILES), settings)
        self._health = HealthFollower(registry, settings.step_stall_s)
        self._room = ServiceRoom(registry, settings, is_alone=lambda: self._interceptor.is_alone)
        self.calls = CallStats()
        # Outermost first: ids, counters, traces and logs; credentials; errors.
        around = CallInterceptor(settings, self.calls, tracing)
        self._server = _server([around, *tokens, self._interceptor], settings)
        self._add_services()
        self.admin: AdminServer | None = None
        if manager is not None and settings.admin_address:
            self.admin = AdminServer(registry, manager, settings, around, tls)
        self.address = main_address(settings)

    async def start(self) -> int:
        """Listen, and make ``address`` what clients connect to; returns the port. Raises RuntimeError when the address
        cannot be had.
        """
        self.address = listen(self._server, self.address, self._credentials, self._settings.socket_access)
        if self.admin is not None:
            await self.admin.start()
        self._health.start()
        await self._server.start()
        return self.port

    async def drain(self, grace_s: float) -> None:
        """Health goes first, then new requests are turned away while running ones get ``grace_s`` to end; then close.

        Those that are queued, so that nothing of them has been computed, are turned away like new ones. Until the
        running ones have ended and no more come the port stays open, so that clients are told UNAVAILABLE with
        RetryInfo instead of losing their connection. So are those whose calls outlast the grace.
        """
        self._health.shut_down()
        self._registry.drain()
        for model in self._registry.serving():
            model.engine.turn_away(shutting_down())
        if self.admin is not None:
            await self.admin.stop()
        if not await self._interceptor.wait_idle(grace_s):
            log.warning("%d calls still ran after %g s and are ended", self._interceptor.num_running, grace_s)
            self._interceptor.evict()
            await self._interceptor.wait_idle(CANCEL_S)
        await self._interceptor.wait_quiet(QUIET_S, min(grace_s, LINGER_S))
        await self._server.stop(CANCEL_S)
        self._room.workers.close()
        self._room.constraints.close()

    async def wait_closed(self) -> None:
        await self._server.wait_for_termination()

    @property
    def port(self) -> int:
        """0 on a Unix socket."""
        return 0 if is_unix(self.address) else int(self.address.rpartition(":")[2])

    @property
    def is_ready(self) -> bool:
        """What overall health says; may be asked from any thread."""
        return self._health.is_ready

    @property
    def has_stalled(self) -> bool:
        """Some engine does not come round any more."""
        return self._health.has_stalled

    @property
    def grpcurl_flags(self) -> str:
        return grpcurl_flags(self._settings)

    @property
    def num_running(self) -> int:
        """Calls inside a handler now."""
        return self._interceptor.num_running

    def _add_services(self) -> None:
        server, room = self._server, self._room
        generate_pb2_grpc.add_GenerateServiceServicer_to_server(GenerateServicer(room), server)
        embed_pb2_grpc.add_EmbedServiceServicer_to_server(EmbedServicer(room), server)
        score_pb2_grpc.add_ScoreServiceServicer_to_server(ScoreServicer(room), server)
        model_pb2_grpc.add_ModelServiceServicer_to_server(ModelServicer(room), server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health.servicer, server)
        if self._settings.reflection != "off":
            add_reflection(server, _service_names(*MODEL_FILES, health_pb2))


def _service_names(*files: Any) -> list[str]:
    return [service.full_name for file in files for service in file.DESCRIPTOR.services_by_name.values()]


def _methods(*files: Any) -> list[str]:
    services = [service for file in files for service in file.DESCRIPTOR.services_by_name.values()]
    return [f"/{service.full_name}/{method.name}" for service in services for method in service.methods]


def _error_interceptor(settings: Settings) -> ErrorInterceptor:
    most, stall_s = settings.max_open_calls, settings.client_stall_s
    return ErrorInterceptor(settings.max_message_bytes, max_open_calls=most, stall_s=stall_s)


def _server(interceptors: list[grpc.aio.ServerInterceptor], settings: Settings) -> grpc.aio.Server:
    options = channel_options(settings)
    return grpc.aio.server(interceptors=interceptors, options=options, compression=compression(settings))


def build_server(
    registry: ModelRegistry,
    settings: Settings,
    manager: ModelManager | None = None,
    tracing: Tracing | None = None,
) -> RuntimeServer:
    """A server that is not listening yet; call ``start``. Needs a running event loop."""
    asyncio.get_running_loop()
    return RuntimeServer(registry, settings, manager, tracing)
