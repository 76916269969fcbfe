"""server.py with a metrics port: open from before the first model to after the last call."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sys
import threading
from types import SimpleNamespace

import pytest

import server
from pyruntime.config import Settings
from pyruntime.engine import Engine
from pyruntime.registry import ServedModel
from pyruntime.scheduler.blocks import BlockPool
from pyruntime.scheduler.scheduler import Scheduler
from pyruntime.types import Capability
from tests.fake_compute import FakeModel
from tests.fakes import byte_tokenizer, fake_model
from tests.ports import free_port
from tests.telemetry.help import Page


@pytest.fixture
def load(monkeypatch):
    """Puts a loader in the place of the one that needs real weights; ``load.go`` lets it begin."""
    go = threading.Event()

    def load_served_model(name, *rest):
        assert go.wait(20)
        model = FakeModel()
        info = fake_model(name, {Capability.EMBED}).info
        return ServedModel(info, Engine(info, Scheduler(BlockPool(8, 4), 64, 8), model, model, model), byte_tokenizer())

    monkeypatch.setitem(sys.modules, "pyruntime.serving", SimpleNamespace(load_served_model=load_served_model))
    return go


async def wait_for(page: Page, path: str, status: int) -> bytes:
    for _ in range(1000):
        got, _, body = await page.get(path)
        if got == status:
            return body
        await asyncio.sleep(0.01)
    raise AssertionError(f"{path} stays {got}")


async def test_the_page_is_there_from_the_start_to_the_end(load, capsys):
    port = free_port()
    running = asyncio.create_task(server.serve(Settings(models={"m": "x"}, port=0, metrics_port=port)))
    page = Page(f"127.0.0.1:{port}")
    for _ in range(1000):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        await asyncio.sleep(0.01)
    assert (await page.get("/readyz"))[0] == 503
    assert (await page.get("/livez"))[0] == 200
    assert (await page.status())["state"] == "starting"
    assert (await page.metrics())["pyruntime_model_state", "m", "loading"] == 1
    load.set()
    await wait_for(page, "/readyz", 200)
    said = ""
    for _ in range(1000):
        said += capsys.readouterr().out
        if "Try" in said:
            break
        await asyncio.sleep(0.01)
    assert re.search(rf"^status page and metrics on http://127.0.0.1:{port}/$", said, re.M), said
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(running, 20) == server.OK
    assert not [thread for thread in threading.enumerate() if thread.name == "metrics"]


async def test_a_taken_metrics_port_is_a_failure(load, caplog):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert await server.serve(Settings(models={"m": "x"}, port=0, metrics_port=port)) == server.FAILED
    assert f"cannot listen on 127.0.0.1:{port}" in caplog.text


async def test_a_taken_grpc_port_closes_the_metrics_port(load):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = Settings(models={"m": "x"}, port=taken.getsockname()[1], metrics_port=0)
        assert await server.serve(settings) == server.FAILED
    assert not [thread for thread in threading.enumerate() if thread.name == "metrics"]
