"""server.py with a loader of its own: health while loading, failures, signals, exit status."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import server
from pyruntime.config import Settings
from pyruntime.registry import ServedModel
from pyruntime.types import Capability
from pyruntime.v1 import admin_pb2, admin_pb2_grpc, model_pb2, model_pb2_grpc
from tests.fakes import fake_model
from tests.ports import free_port
from tests.service.conftest import health_ends

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
def load(monkeypatch) -> Callable[[Callable[[str], ServedModel]], None]:
    """Puts a loader in the place of the one that needs real weights."""

    def install(loader: Callable[[str], ServedModel]) -> None:
        module = SimpleNamespace(load_served_model=lambda name, *rest: loader(name))
        monkeypatch.setitem(sys.modules, "pyruntime.serving", module)

    return install


async def states(port: int, announced: asyncio.Event) -> list[int]:
    """Overall health, each change, until the server goes away; it is stopped once it has said that it serves."""
    seen = []
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        await asyncio.wait_for(channel.channel_ready(), 10)
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        try:
            async for response in watch:
                seen.append(response.status)
                if response.status == SERVING:
                    await asyncio.wait_for(announced.wait(), 10)
                    os.kill(os.getpid(), signal.SIGTERM)
        except grpc.aio.AioRpcError as error:
            assert error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    return seen


async def test_health_from_start_to_end(load, capsys, monkeypatch):
    asked, announced = threading.Event(), asyncio.Event()
    announce = server.announce

    def announce_and_tell(*arguments) -> None:
        announce(*arguments)
        announced.set()

    monkeypatch.setattr(server, "announce", announce_and_tell)

    def loader(name: str) -> ServedModel:
        if name == "torn":
            raise ValueError("weights are torn")
        assert asked.wait(10)  # health has been asked while this model was loading
        return fake_model(name, {Capability.GENERATE})

    load(loader)
    port = free_port()
    running = asyncio.create_task(server.serve(Settings(models={"torn": "a", "good": "b"}, port=port)))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        await asyncio.wait_for(channel.channel_ready(), 10)
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert answer.status == NOT_SERVING
    watching = asyncio.create_task(states(port, announced))
    asked.set()
    assert await asyncio.wait_for(running, 20) == 0
    seen = await watching
    assert seen[-2:] == [SERVING, NOT_SERVING]
    out = capsys.readouterr().out
    assert f"SERVING on 127.0.0.1:{port}: good" in out
    assert f"127.0.0.1:{port} pyruntime.v1.GenerateService/GenerateStream" in out


async def test_no_model_at_all_is_a_failure(load, caplog):
    def loader(name: str) -> ServedModel:
        raise ValueError("weights are torn")

    load(loader)
    assert await asyncio.wait_for(server.serve(Settings(models={"torn": "a"}, port=free_port())), 20) == 1
    assert "model torn is not served: weights are torn" in caplog.text


async def test_a_taken_port_is_a_failure(load, caplog):
    load(lambda name: fake_model(name, {Capability.EMBED}))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert await server.serve(Settings(models={"m": "a"}, port=port)) == 1
    assert f"cannot listen on 127.0.0.1:{port}" in caplog.text


def test_nothing_to_serve_is_bad_usage(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["server.py"])
    assert server.main() == 2
    assert "--model NAME=PATH" in capsys.readouterr().err


async def test_an_engine_that_breaks_down_takes_its_model_out_of_service(load):
    models = {name: fake_model(name, {Capability.GENERATE}) for name in ("one", "two")}
    load(models.__getitem__)
    port = free_port()
    running = asyncio.create_task(server.serve(Settings(models={"one": "a", "two": "b"}, port=port)))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        await asyncio.wait_for(channel.channel_ready(), 10)
        request = health_pb2.HealthCheckRequest(service="pyruntime.v1.GenerateService")
        watch = health_pb2_grpc.HealthStub(channel).Watch(request)
        while (await asyncio.wait_for(watch.read(), 10)).status != SERVING:
            pass
        for _ in range(500):
            if models["two"].engine.on_failed is not None:
                break
            await asyncio.sleep(0.01)
        for name, model in models.items():
            # On a thread of its own, as the engine calls it.
            await asyncio.to_thread(model.engine.on_failed, f"the engine of model {name} has failed")
        assert (await asyncio.wait_for(watch.read(), 10)).status == NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await model_pb2_grpc.ModelServiceStub(channel).GetModel(model_pb2.GetModelRequest(model="one"))
        assert caught.value.details() == "model 'one' is not served: the engine of model one has failed"
        watch.cancel()
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(running, 20) == 0


async def test_a_lost_device_ends_the_process_after_health_has_said_so(load, caplog):
    model = fake_model("one", {Capability.GENERATE})
    load(lambda name: model)
    port = free_port()
    running = asyncio.create_task(server.serve(Settings(models={"one": "a"}, port=port)))
    async with health_ends(port):
        await asyncio.to_thread(model.engine.on_failed, "the device of model one has failed")
        await asyncio.to_thread(model.engine.on_device_lost, "cuda:0: an illegal memory access")
    assert await asyncio.wait_for(running, 20) == server.DEVICE_LOST != 0
    assert "cuda:0: an illegal memory access" in caplog.text


async def test_the_addresses_that_it_tells_can_be_connected_to(load, capsys):
    load(lambda name: fake_model(name, {Capability.EMBED}))
    settings = Settings(models={"m": "a"}, host="::1", port=0, admin_address="[::1]:0")
    running = asyncio.create_task(server.serve(settings))
    said = ""
    for _ in range(1000):
        said += capsys.readouterr().out
        if "Try" in said:
            break
        await asyncio.sleep(0.01)
    addresses = re.findall(r"^(?:SERVING|pyruntime.v1.AdminService) on (\S+?):? ?m?$", said, re.M)
    assert len(set(addresses)) == 2, said
    assert f"{addresses[0]} pyruntime.v1.EmbedService/Embed" in said
    for address in addresses:
        async with grpc.aio.insecure_channel(address) as channel:
            await asyncio.wait_for(channel.channel_ready(), 10)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(running, 20) == 0


async def test_with_an_admin_address_models_may_come_later(load, capsys):
    load(lambda name: fake_model(name, {Capability.EMBED}))
    port, admin = free_port(), f"127.0.0.1:{free_port()}"
    running = asyncio.create_task(server.serve(Settings(port=port, admin_address=admin)))
    async with grpc.aio.insecure_channel(admin) as channel:
        await asyncio.wait_for(channel.channel_ready(), 10)
        answer = await admin_pb2_grpc.AdminServiceStub(channel).LoadModel(
            admin_pb2.LoadModelRequest(name="late", path="/a")
        )
        assert answer.model.name == "late"
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(running, 20) == 0
    assert f"pyruntime.v1.AdminService on {admin}" in capsys.readouterr().out


async def test_a_taken_admin_address_is_a_failure(load, caplog):
    load(lambda name: fake_model(name, {Capability.EMBED}))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        admin = f"127.0.0.1:{taken.getsockname()[1]}"
        assert await server.serve(Settings(models={"m": "a"}, port=free_port(), admin_address=admin)) == 1
    assert f"cannot listen on {admin}" in caplog.text


LOADS_FOR_EVER = """
import sys, types
import torch

def load_served_model(name, path, settings, progress, num_sharing):
    progress("loading")
    matrix = torch.randn(64, 64)
    while True:
        matrix = torch.tanh(matrix @ matrix)

sys.modules["pyruntime.serving"] = types.SimpleNamespace(load_served_model=load_served_model)
import server
sys.argv = ["server.py", "--model", "m=/nowhere", "--port", "0"]
sys.exit(server.main())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_a_model_is_loading_ends_the_process_in_order(number):
    """Torch aborts a process whose interpreter ends while a thread is inside of it."""
    process = subprocess.Popen(
        [sys.executable, "-c", LOADS_FOR_EVER],
        cwd=Path(server.__file__).parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "loading\n"
        process.send_signal(number)
        _, complaint = process.communicate(timeout=10)
    finally:
        process.kill()
    assert (process.returncode, complaint) == (0, "")
