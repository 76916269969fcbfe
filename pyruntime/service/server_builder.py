"""All servicers on one grpc.aio server, the operator's on another, and their orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pyruntime.config import Settings
from pyruntime.lifecycle import ModelManager
from pyruntime.registry import ModelRegistry
from pyruntime.service.admin import AdminServicer
from pyruntime.service.embed import EmbedServicer
from pyruntime.service.generate import GenerateServicer
from pyruntime.service.health import HealthFollower
from pyruntime.service.interceptor import ErrorInterceptor
from pyruntime.service.model import ModelServicer
from pyruntime.service.reflection import add_reflection
from pyruntime.service.room import ServiceRoom
from pyruntime.service.score import ScoreServicer
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


class AdminServer:
    """AdminService at an address of its own, which clients of the models do not get to."""

    def __init__(self, registry: ModelRegistry, manager: ModelManager, settings: Settings) -> None:
        self.address = settings.admin_address
        self._interceptor = ErrorInterceptor(settings.max_message_bytes)
        self._server = grpc.aio.server(interceptors=[self._interceptor], options=_options(settings))
        servicer = AdminServicer(registry, manager, settings)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(servicer, self._server)
        add_reflection(self._server, _service_names(admin_pb2))

    async def start(self) -> None:
        """Listen, and make ``address`` what clients connect to. Raises RuntimeError when the address cannot be had."""
        _refuse_taken_socket(self.address)
        # A Unix socket is made with the rights that this leaves it: its owner's alone, from the first moment on.
        others = os.umask(0o177)
        try:
            self.address = _listen(self._server, self.address)
        finally:
            os.umask(others)
        await self._server.start()

    async def stop(self) -> None:
        """End the calls that wait for a load or an unload; their clients are told UNAVAILABLE."""
        self._interceptor.evict()
        await self._interceptor.wait_idle(CANCEL_S)
        await self._server.stop(CANCEL_S)


class RuntimeServer:
    """The gRPC face of a registry. Make it on the event loop that runs it.

    ``manager``: who loads for AdminService, which is served when there is one and the settings have an admin address.
    """

    def __init__(self, registry: ModelRegistry, settings: Settings, manager: ModelManager | None = None) -> None:
        self._registry = registry
        self._settings = settings
        self._interceptor = ErrorInterceptor(settings.max_message_bytes)
        self._health = HealthFollower(registry)
        self._room = ServiceRoom(registry, settings)
        self._server = grpc.aio.server(interceptors=[self._interceptor], options=_options(settings))
        self._add_services()
        self.admin = AdminServer(registry, manager, settings) if manager and settings.admin_address else None
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        self.address = f"{host}:{settings.port}"

    async def start(self) -> int:
        """Listen, and make ``address`` what clients connect to; returns the port. Raises RuntimeError when the address
        cannot be had.
        """
        self.address = _listen(self._server, self.address)
        if self.admin is not None:
            await self.admin.start()
        await self._health.start()
        await self._server.start()
        return self.port

    async def drain(self, grace_s: float) -> None:
        """Health goes first, then new requests are turned away while running ones get ``grace_s`` to end; then close.

        Until the running ones have ended the port stays open, so that clients are told UNAVAILABLE with
        RetryInfo instead of losing their connection. So are those whose calls outlast the grace.
        """
        await self._health.shut_down()
        self._registry.drain()
        if self.admin is not None:
            await self.admin.stop()
        if not await self._interceptor.wait_idle(grace_s):
            log.warning("%d calls still ran after %g s and are ended", self._interceptor.num_running, grace_s)
            self._interceptor.evict()
            await self._interceptor.wait_idle(CANCEL_S)
        await self._server.stop(CANCEL_S)
        self._room.workers.close()
        self._room.constraints.close()

    async def wait_closed(self) -> None:
        await self._server.wait_for_termination()

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

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
        add_reflection(server, _service_names(generate_pb2, embed_pb2, score_pb2, model_pb2, health_pb2))


def _service_names(*files: Any) -> list[str]:
    return [service.full_name for file in files for service in file.DESCRIPTOR.services_by_name.values()]


def _refuse_taken_socket(address: str) -> None:
    """gRPC would take a Unix socket away from a process that listens on it, as from one that has left it behind."""
    if address.startswith("unix:"):
        with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
            probe.connect(address.removeprefix("unix:"))
            raise RuntimeError(f"cannot listen on {address}: another process does")


def _listen(server: grpc.aio.Server, address: str) -> str:
    """The address with the port that was got, which is another one than 0."""
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise RuntimeError(f"cannot listen on {address}: {error}") from error
    return address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"


def _options(settings: Settings) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.max_send_message_length", settings.max_message_bytes),
        # Else a second server on the same port starts without a complaint and takes half of the connections.
        ("grpc.so_reuseport", 0),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ]


def build_server(registry: ModelRegistry, settings: Settings, manager: ModelManager | None = None) -> RuntimeServer:
    """A server that is not listening yet; call ``start``. Needs a running event loop."""
    asyncio.get_running_loop()
    return RuntimeServer(registry, settings, manager)
