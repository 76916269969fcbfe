"""Where the server listens, and what a connection may do and cost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import stat
from pathlib import Path

import grpc
import pytest

import server as program
from pyruntime.config import Settings
from pyruntime.errors import UnsafeTransport
from pyruntime.registry import ModelRegistry
from pyruntime.service.listeners import channel_options, grpcurl_flags, refuse_open_plaintext, warn_of_open_doors
from pyruntime.service.server_builder import build_server
from pyruntime.v1 import generate_pb2, model_pb2, model_pb2_grpc
from tests.fakes import play
from tests.service.conftest import failure_of
from tests.service.transport import GENERATE, Answer, RawClient, frame, running, settings, stack_of

TLS = {"tls_certificate": "a", "tls_key": "b"}


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "example.org", "::ffff:10.0.0.1"])
@pytest.mark.parametrize("option", ["host", "admin_address"])
def test_plaintext_for_others_has_to_be_asked_for(host, option):
    given = {option: host if option == "host" else f"[{host}]:50052" if ":" in host else f"{host}:50052"}
    with pytest.raises(UnsafeTransport) as caught:
        refuse_open_plaintext(settings(**given))
    flag = "--" + option.replace("_", "-")
    assert str(caught.value).startswith(f"{flag} {given[option]} would serve other machines without TLS")
    assert "--tls-certificate" in str(caught.value) and "--insecure" in str(caught.value)
    refuse_open_plaintext(settings(**given, insecure=True))
    refuse_open_plaintext(settings(**given, **TLS))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "localhost", "::1", "unix:/tmp/x.sock"])
def test_plaintext_for_this_machine_alone_is_the_default(host):
    refuse_open_plaintext(settings(host=host))
    admin = host if host.startswith("unix:") else f"[{host}]:1" if ":" in host else f"{host}:1"
    refuse_open_plaintext(settings(admin_address=admin))


async def test_a_server_is_not_built_for_others_in_plaintext(capsys):
    with pytest.raises(UnsafeTransport):
        build_server(ModelRegistry(), settings(host="0.0.0.0"))
    assert await program.serve(Settings(models={"m": "a"}, host="0.0.0.0", port=0)) == program.BAD_USAGE
    assert capsys.readouterr().err.startswith("server.py: --host 0.0.0.0 would serve other machines without TLS")


def test_what_is_more_likely_forgotten_than_meant_is_logged(caplog):
    caplog.set_level(logging.WARNING)
    warn_of_open_doors(settings(token_file="t", admin_token_file="u", admin_address="127.0.0.1:1"))
    warn_of_open_doors(settings(token_file="t", host="0.0.0.0", **TLS))
    assert not caplog.records
    warn_of_open_doors(settings(token_file="t", host="0.0.0.0", insecure=True))
    warn_of_open_doors(settings(token_file="t", admin_address="127.0.0.1:1"))
    first, second = (record.getMessage() for record in caplog.records)
    assert "without TLS" in first and "asks for no token" in second


@pytest.mark.parametrize(("access", "mode"), [("owner", 0o600), ("group", 0o660), ("all", 0o666)])
async def test_a_unix_socket_and_its_rights(tmp_path: Path, access, mode):
    path = tmp_path / "main.sock"
    async with running(settings(host=f"unix:{path}", socket_access=access)) as (server, _):
        assert stat.S_IMODE(path.stat().st_mode) == mode
        assert (server.address, server.port) == (f"unix:{path}", 0)
        async with grpc.aio.insecure_channel(server.address) as channel:
            stub = model_pb2_grpc.ModelServiceStub(channel)
            assert len((await stub.ListModels(model_pb2.ListModelsRequest())).models) == 2
        second = build_server(ModelRegistry(), settings(host=f"unix:{path}"))
        with pytest.raises(RuntimeError, match="another process does"):
            await second.start()
        await second.drain(0)


def test_calls_to_paste_fit_the_transport():
    assert grpcurl_flags(settings()) == "-plaintext"
    assert grpcurl_flags(settings(host="unix:/x")) == "-plaintext -unix"
    assert grpcurl_flags(settings(**TLS)) == "-cacert CA.pem"
    assert "-cert CLIENT.pem" in grpcurl_flags(settings(**TLS, tls_client_ca="c"))
    assert grpcurl_flags(settings(token_file="t")) == "-plaintext -H 'authorization: Bearer TOKEN'"


def test_what_is_off_is_not_passed_on():
    off = dict(channel_options(settings(keepalive_s=0, max_connection_idle_s=0, max_connection_age_s=0)))
    assert not off.keys() & {"grpc.keepalive_time_ms", "grpc.max_connection_idle_ms", "grpc.max_connection_age_ms"}
    on = dict(channel_options(settings(keepalive_s=0.5, max_connection_age_s=10**6)))
    assert (on["grpc.keepalive_time_ms"], on["grpc.max_connection_age_ms"]) == (500, 10**9)


async def test_a_connection_that_is_old_is_ended_without_losing_calls():
    """The client is told to open another one; the call that runs ends on the old one."""
    async with stack_of(settings(max_connection_age_s=0.2)) as stack:

        def wait_for_goodbye() -> Answer:
            with RawClient(stack.server.port) as client:
                return client.finish(client.open(GENERATE))  # and no message: it stays open

        assert (await asyncio.to_thread(wait_for_goodbye)).ended == "ConnectionTerminated"
        for _ in range(3):  # a real client notices nothing
            assert len((await stack.models.ListModels(model_pb2.ListModelsRequest())).models) == 2


async def test_a_client_that_does_not_answer_pings_is_given_up():
    async with stack_of(settings(keepalive_s=1, keepalive_timeout_s=1)) as stack:

        def be_silent() -> bytes:
            with RawClient(stack.server.port) as client:
                client.read()  # the settings, which it acknowledges
                client.open(GENERATE)
                data = b"x"
                while data:  # nothing is answered, pings included
                    data = client.socket.recv(65536)
                return data

        assert await asyncio.wait_for(asyncio.to_thread(be_silent), 10) == b""


async def test_pings_of_a_mesh_are_welcome():
    """Every ten seconds, calls or not, is what proxies do; the limit is twice as fast."""
    assert dict(channel_options(settings()))["grpc.http2.min_ping_interval_without_data_ms"] <= 5000
    assert dict(channel_options(settings()))["grpc.keepalive_permit_without_calls"] == 1


async def test_a_connection_has_so_many_calls():
    async with stack_of(settings(max_streams_per_connection=3)) as stack:

        def streams() -> int:
            with RawClient(stack.server.port) as client:
                while client.http.remote_settings.max_concurrent_streams != 3:
                    client.read()
                return client.http.remote_settings.max_concurrent_streams

        assert await asyncio.to_thread(streams) == 3


async def test_so_many_calls_are_open_at_once():
    async with stack_of(settings(max_open_calls=2)) as stack:
        held = [stack.embed.EmbedStream() for _ in range(2)]
        for call in held:
            await call.wait_for_connection()
        failure = None
        for _ in range(100):  # until the server has seen the two
            call = stack.models.ListModels(model_pb2.ListModelsRequest())
            if await call.code() is not grpc.StatusCode.OK:
                failure = await failure_of(call)
                break
        assert (failure.code, failure.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")
        assert failure.retry_s > 0
        for call in held:
            call.cancel()
        for _ in range(500):
            call = stack.models.ListModels(model_pb2.ListModelsRequest())
            if await call.code() is grpc.StatusCode.OK:
                break
        else:
            raise AssertionError("the places of calls that have ended are not free again")


@pytest.mark.parametrize("compress", [False, True])
async def test_answers_are_compressed_when_asked_for(compress):
    async with stack_of(settings(compress_responses=compress)) as stack:
        stack.engine.next_stream = play("a" * 1000, per_wakeup=1000)
        request = generate_pb2.GenerateRequest(model="decoder", text="x").SerializeToString()

        def flag() -> int:
            with RawClient(stack.server.port) as client:
                stream = client.open(GENERATE, grpc_accept_encoding="identity,gzip")
                client.send(stream, frame(request))
                answer = client.finish(stream)
                assert answer.code == 0, answer
                return answer.data[0]

        assert await asyncio.to_thread(flag) == int(compress)
        stack.engine.next_stream = play("a" * 1000, per_wakeup=1000)
        answer = await stack.generate.Generate(generate_pb2.GenerateRequest(model="decoder", text="x"))
        assert answer.completions[0].text == "a" * 1000


async def test_a_socket_whose_owner_is_too_busy_to_answer_is_taken(tmp_path: Path):
    path = str(tmp_path / "busy.sock")
    with socket.socket(socket.AF_UNIX) as busy, contextlib.ExitStack() as waiting:
        busy.bind(path)
        busy.listen(0)
        with contextlib.suppress(BlockingIOError):
            for _ in range(100):  # until no more may wait
                client = waiting.enter_context(socket.socket(socket.AF_UNIX))
                client.setblocking(False)
                client.connect(path)
        server = build_server(ModelRegistry(), settings(host=f"unix:{path}"))
        with pytest.raises(RuntimeError, match="another process does"):
            await server.start()
        await server.drain(0)
