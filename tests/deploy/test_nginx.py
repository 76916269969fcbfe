"""deploy/nginx/nginx.conf in a real nginx: streams, errors with their trailers, cancellation, a drain."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from pyruntime.v1 import admin_pb2, embed_pb2, generate_pb2
from tests.deploy.replicas import (
    ROOT,
    TEXT,
    Replica,
    Stubs,
    behind_a_proxy,
    held_request,
    text_of,
)
from tests.ports import free_port
from tests.service.conftest import failure_of
from tests.tools import need

CONFIG = ROOT / "deploy/nginx/nginx.conf"
HOW = "apt-get install nginx-light"


@dataclass
class Proxied:
    replicas: list[Replica]
    stubs: Stubs
    log: Path


def patched(folder: Path, port: int, backends: list[int]) -> str:
    """The file as it is, addresses, paths and one worker apart."""
    text = CONFIG.read_text()
    for old, new in {
        "listen 8080 http2": f"listen 127.0.0.1:{port} http2",
        "127.0.0.1:50051": f"127.0.0.1:{backends[0]}",
        "127.0.0.1:50052": f"127.0.0.1:{backends[1]}",
        "/dev/stdout": str(folder / "access.log"),
        "worker_processes auto": "worker_processes 1",
    }.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    paths = "".join(
        f"    {kind}_temp_path {folder}/{kind};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    return f"pid {folder}/nginx.pid;\n" + text.replace("http {\n", "http {\n" + paths, 1)


@pytest.fixture
async def proxied(tmp_path: Path) -> AsyncIterator[Proxied]:
    nginx = need("nginx", HOW)
    port, config = free_port(), tmp_path / "nginx.conf"

    def command(backends: list[int]) -> list[str]:
        config.write_text(patched(tmp_path, port, backends))
        return [nginx, "-c", str(config), "-e", "stderr", "-g", "daemon off;"]

    async with behind_a_proxy(command, port, tmp_path / "nginx.log") as (replicas, stubs):
        yield Proxied(replicas, stubs, tmp_path / "access.log")


async def test_calls_are_spread_over_the_replicas(proxied: Proxied):
    for _ in range(20):
        answer = await proxied.stubs.generate.Generate(generate_pb2.GenerateRequest(text="hi"))
        assert answer.completions[0].text == TEXT
    assert all(replica.calls >= 5 for replica in proxied.replicas)


async def test_errors_pass_with_their_details(proxied: Proxied):
    failure = await failure_of(proxied.stubs.embed.Embed(embed_pb2.EmbedRequest()))
    assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
    assert "inputs" in failure.violations


async def test_the_admin_service_is_not_reachable(proxied: Proxied):
    unload = proxied.stubs.channel.unary_unary(
        "/pyruntime.v1.AdminService/UnloadModel", request_serializer=admin_pb2.UnloadModelRequest.SerializeToString
    )
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await unload(admin_pb2.UnloadModelRequest(name="m"))
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_streams_come_piece_by_piece_and_a_cancellation_arrives(proxied: Proxied):
    call = proxied.stubs.generate.GenerateStream(held_request())
    assert (await asyncio.wait_for(anext(aiter(call)), 10)).text  # while the server holds the rest back
    call.cancel()
    replica = next(each for each in proxied.replicas if each.calls)
    await asyncio.wait_for(replica.engine.streams[0].stopped.wait(), 10)


async def test_a_drain_loses_no_stream(proxied: Proxied):
    leaving, _ = proxied.replicas
    streams, first = await proxied.stubs.held(12)
    assert all(replica.calls for replica in proxied.replicas)
    drain = asyncio.create_task(leaving.server.drain(30))
    for replica in proxied.replicas:
        replica.engine.go.set()
    for chunk, stream in zip(first, streams, strict=True):
        assert text_of([chunk, *[each async for each in stream]]) == TEXT
    await asyncio.wait_for(drain, 20)
    # It is gone: every call finds the other.
    for _ in range(10):
        assert (await proxied.stubs.generate.Generate(generate_pb2.GenerateRequest(text="hi"))).completions


async def test_a_draining_replica_tells_clients_when_to_come_back(proxied: Proxied):
    streams, _ = await proxied.stubs.held(2)
    drains = [asyncio.create_task(replica.server.drain(30)) for replica in proxied.replicas]
    while not all(replica.registry.is_draining for replica in proxied.replicas):
        await asyncio.sleep(0)
    failure = await failure_of(proxied.stubs.embed.Embed(embed_pb2.EmbedRequest(inputs=[{"text": "a"}])))
    assert failure.code is grpc.StatusCode.UNAVAILABLE
    assert failure.retry_s
    for replica in proxied.replicas:
        replica.engine.go.set()
    for stream in streams:
        assert [chunk async for chunk in stream]
    await asyncio.wait_for(asyncio.gather(*drains), 20)
    # Nobody is left: nginx says so as a gRPC status.
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await proxied.stubs.embed.Embed(embed_pb2.EmbedRequest(inputs=[{"text": "a"}]))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "no replica can be reached" in caught.value.details()


async def test_a_large_message_passes(proxied: Proxied):
    """Larger than any buffer on the way; what is wrong with it the server says."""
    inputs = [{"text": "x" * 1_500_000} for _ in range(4)]
    failure = await failure_of(proxied.stubs.embed.Embed(embed_pb2.EmbedRequest(inputs=inputs)))
    assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
    assert any(field.startswith("inputs[3]") for field in failure.violations)
