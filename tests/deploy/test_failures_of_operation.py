"""The rest of the table of failures in docs/operations.md: what takes an engine, a process or files to go wrong."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import server
from pyruntime.config import Settings
from pyruntime.engine import Engine
from pyruntime.errors import DeadlinePassed
from pyruntime.scheduler.blocks import BlockPool
from pyruntime.scheduler.scheduler import Scheduler
from pyruntime.v1 import embed_pb2, embed_pb2_grpc, generate_pb2_grpc, model_pb2, model_pb2_grpc
from tests.deploy.test_failures import CASES, ROWS
from tests.fake_compute import until
from tests.ports import free_port
from tests.service.conftest import failure_of, health_ends
from tests.service.secured import pem_files, served
from tests.service.test_flow import SMALL_WINDOW, Site, alphabet, request
from tests.service.test_stalled_clients import site_with

HERE = Path(__file__)
LIST = model_pb2.ListModelsRequest()
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def is_in(log: str, text: str) -> bool:
    """Whether the line that the table gives, of whatever numbers, was written."""
    shape = re.escape(log.strip("`")).replace("N\\ ", r"\d+\ ").replace("…", r".+")
    return re.search(shape, text) is not None


async def test_a_token_for_other_methods(tmp_path: Path):
    status, reason, *_ = ROWS["a token that is not for this method"]
    (tmp_path / "tokens").write_text("a-token-that-is-long-enough-0123456789 EmbedService\n")
    async with served(token_file=str(tmp_path / "tokens")) as address, grpc.aio.insecure_channel(address) as channel:
        given = (("authorization", "Bearer a-token-that-is-long-enough-0123456789"),)
        failure = await failure_of(model_pb2_grpc.ModelServiceStub(channel).ListModels(LIST, metadata=given))
    assert (failure.code.name, failure.reason) == (status, reason)


async def test_too_many_calls():
    status, reason, _, _, what = ROWS["too many calls at once"]
    async with served(max_open_calls=1) as address, grpc.aio.insecure_channel(address) as channel:
        stream = embed_pb2_grpc.EmbedServiceStub(channel).EmbedStream()
        await stream.write(embed_pb2.EmbedRequest(inputs=[{"text": "a"}]))
        assert (await stream.read()).results
        failure = await failure_of(model_pb2_grpc.ModelServiceStub(channel).ListModels(LIST))
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF
    assert status == f"{failure.code.name}, RetryInfo {failure.retry_s:g} s"
    assert (failure.reason, what) == (reason, "`--max-open-calls`")


async def test_a_client_that_does_not_read():
    status, reason, *_ = ROWS["a client does not read its stream"]
    async with site_with(0.2) as site, site.channel(SMALL_WINDOW) as channel:
        call = generate_pb2_grpc.GenerateServiceStub(channel).GenerateStream(request(3000, wide=True))
        assert await call.read()
        await until(lambda: site.num_paused == 1)
        await site.freed()
        failure = await failure_of(call)
    assert status == f"{failure.code.name} after `--client-stall-s`"
    assert failure.reason == reason


async def test_too_few_cache_blocks():
    status, reason, _, _, what = ROWS["cache blocks run out"]
    assert (status.partition(":")[0], reason) == ("none", "none")
    assert "`pyruntime_preemptions_total`" in what
    site = Site()
    await asyncio.to_thread(site.engine.close)
    model = site.registry.serving()[0]
    model.engine = site.engine = Engine(model.info, Scheduler(BlockPool(12, 4), 64, 16), *[site.model] * 3)
    await site.start()
    async with site.channel() as channel:
        stub = generate_pb2_grpc.GenerateServiceStub(channel)
        site.model.hold = True
        calls = [stub.Generate(request(36, text=text)) for text in ("hi", "you")]
        await until(lambda: site.engine.num_open == 2)
        site.let_go()
        answers = [await call for call in calls]
    assert [answer.completions[0].text for answer in answers] == [alphabet(36)] * 2
    await until(lambda: site.engine.load().scheduler.num_set_back >= 1)  # published a moment later
    await site.server.drain(0)
    await asyncio.to_thread(site.engine.close)


async def test_a_step_that_hangs(caplog: pytest.LogCaptureFixture):
    status, reason, log, health, _ = ROWS["a step hangs"]
    assert (status, reason) == ("that of its deadline", DeadlinePassed.reason)
    site = Site()
    site.settings = Settings(port=0, step_stall_s=0.2)
    await site.start()
    async with site.channel() as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == SERVING
        site.model.hold = True
        stub = generate_pb2_grpc.GenerateServiceStub(channel)
        call = stub.Generate(request(1))
        assert (await asyncio.wait_for(watch.read(), 10)).status == NOT_SERVING
        assert health.startswith("NOT_SERVING after `--step-stall-s`")
        assert is_in(log, caplog.text)
        late = stub.Generate(request(1), timeout=0.2)
        with pytest.raises(grpc.aio.AioRpcError, match="DEADLINE_EXCEEDED"):
            await late
        call.cancel()
        site.let_go()
        assert (await asyncio.wait_for(watch.read(), 10)).status == SERVING
    await site.server.drain(0)
    await asyncio.to_thread(site.engine.close)


async def test_a_device_that_is_lost(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    """The forward of a real engine raises what CUDA says when a device is gone."""
    status, reason, log, health, _ = ROWS["a device is lost"]
    broken = Site()
    broken.model.forward = lambda batch: (_ for _ in ()).throw(RuntimeError("CUDA error: an illegal memory access"))
    (model,) = broken.registry.serving()
    monkeypatch.setitem(sys.modules, "pyruntime.serving", SimpleNamespace(load_served_model=lambda *_: model))
    port = free_port()
    running = asyncio.create_task(server.serve(Settings(models={"m": "a"}, port=port)))
    async with health_ends(port) as channel:
        failure = await failure_of(generate_pb2_grpc.GenerateServiceStub(channel).Generate(request(1)))
    assert (failure.code.name, failure.reason) == (status, reason)
    assert health == f"NOT_SERVING, exit {await asyncio.wait_for(running, 20)}"
    assert is_in(log, caplog.text)


def tear(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:300])


async def test_a_torn_certificate_file(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    status, _, log, health, _ = ROWS["a torn certificate file"]
    assert (status, health) == ("none: the former stays", "stays")
    files = pem_files(tmp_path)
    caplog.set_level(logging.WARNING)
    async with served(tls_certificate=files["server"], tls_key=files["server_key"]) as address:
        tear(Path(files["server"]))
        credentials = grpc.ssl_channel_credentials(files["pem"])
        async with grpc.aio.secure_channel(address, credentials) as channel:
            assert (await model_pb2_grpc.ModelServiceStub(channel).ListModels(LIST)).models
    assert is_in(log, caplog.text)


async def test_an_address_that_is_taken(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    _, _, log, health, _ = ROWS["an address is taken"]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        status = await server.serve(Settings(models={"m": "a"}, port=port))
    assert health == f"exit {status}"
    assert is_in(log, caplog.text)


async def test_plaintext_and_bad_options(capsys: pytest.CaptureFixture[str]):
    _, _, log, health, _ = ROWS["plaintext beyond loopback, a bad option"]
    assert log == "a line that names the option"
    assert health == f"exit {await server.serve(Settings(models={'m': 'a'}, host='0.0.0.0', port=0))}"
    assert "--insecure" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        Settings.load(["--drain-grace-s", "-1"], {})
    assert health == f"exit {stopped.value.code}"
    assert "--drain-grace-s" in capsys.readouterr().err


def test_every_row_of_the_table_is_made_to_happen():
    text = HERE.read_text() + HERE.with_name("test_failures.py").read_text()
    assert {name for name in ROWS if name not in CASES} == set(re.findall(r'ROWS\["([^"]+)"\]', text))
