"""Where AdminService listens, and who gets to it."""

from __future__ import annotations

import socket
import stat
from pathlib import Path

import grpc
import pytest

from pyruntime.lifecycle import ModelManager
from pyruntime.registry import ModelRegistry
from pyruntime.service.server_builder import RuntimeServer, build_server
from pyruntime.v1 import admin_pb2, admin_pb2_grpc
from tests.service.conftest import SETTINGS


async def test_it_is_off_without_an_address():
    registry = ModelRegistry()
    assert RuntimeServer(registry, SETTINGS, ModelManager(registry, SETTINGS, print)).admin is None


async def test_a_unix_socket_is_for_its_owner_alone(tmp_path: Path):
    path = tmp_path / "admin.sock"
    settings = SETTINGS.model_copy(update={"admin_address": f"unix:{path}"})
    registry = ModelRegistry()
    server = build_server(registry, settings, ModelManager(registry, settings, print))
    await server.start()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        assert list((await stub.ListModelStates(admin_pb2.ListModelStatesRequest())).models) == []
    second = build_server(registry, settings, ModelManager(registry, settings, print))
    with pytest.raises(RuntimeError, match="another process does"):
        await second.start()
    await server.drain(0)


async def test_a_socket_that_was_left_behind_is_taken(tmp_path: Path):
    path = tmp_path / "admin.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    settings = SETTINGS.model_copy(update={"admin_address": f"unix:{path}"})
    registry = ModelRegistry()
    server = build_server(registry, settings, ModelManager(registry, settings, print))
    await server.start()
    await server.drain(0)
