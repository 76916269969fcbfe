"""``deploy/service-config.json``, by which clients of any language retry and find healthy servers."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import grpc
import pytest

from pyruntime.errors import NotReady, Overloaded, ResponseTooLarge
from pyruntime.v1 import embed_pb2, embed_pb2_grpc, generate_pb2, generate_pb2_grpc, model_pb2, score_pb2
from tests.service.conftest import Stack

CONFIG = (Path(__file__).parents[2] / "deploy" / "service-config.json").read_text()
EMBED = embed_pb2.EmbedRequest(model="decoder", inputs=[{"text": "a"}])
GENERATE = generate_pb2.GenerateRequest(model="decoder", text="a")


def channel_to(stack: Stack) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(stack.address, options=[("grpc.service_config", CONFIG)])


def failing_first(stack: Stack, name: str, *errors: Exception) -> list[float]:
    """Lets an engine's method fail in these ways, then succeed. The list gets the time of each attempt."""
    method, times, left = getattr(stack.engine, name), [], list(errors)

    def attempt(request, **options):
        times.append(time.monotonic())
        if left:
            raise left.pop(0)
        return method(request, **options)

    setattr(stack.engine, name, attempt)
    return times


def test_every_method_but_the_bulk_stream_has_a_policy():
    """EmbedStream's messages are no single request that could be kept and sent again, and it has no deadline."""
    named = [name for entry in json.loads(CONFIG)["methodConfig"] for name in entry["name"]]
    for file in (generate_pb2, embed_pb2, score_pb2, model_pb2):
        for service in file.DESCRIPTOR.services_by_name.values():
            methods = [name.get("method") for name in named if name["service"] == service.full_name]
            assert methods == (["Embed"] if service.name == "EmbedService" else [None])


async def test_grpc_itself_sends_again_what_the_server_could_not_take_and_waits_as_told(stack: Stack):
    times = failing_first(stack, "embed", NotReady("loading", 0.4), Overloaded("full", 0.05))
    async with channel_to(stack) as channel:
        response = await embed_pb2_grpc.EmbedServiceStub(channel).Embed(EMBED, timeout=30)
    assert len(response.results) == 1
    assert len(times) == 3
    assert times[1] - times[0] >= 0.39
    times = failing_first(stack, "generate", Overloaded("full", 0.01))
    async with channel_to(stack) as channel:
        call = generate_pb2_grpc.GenerateServiceStub(channel).GenerateStream(GENERATE, timeout=30)
        assert "".join([chunk.text async for chunk in call]) == "ok"
    assert len(times) == 2


async def test_what_can_never_succeed_is_not_sent_again(stack: Stack):
    times = failing_first(stack, "embed", ResponseTooLarge("large"), ResponseTooLarge("large"))
    async with channel_to(stack) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await embed_pb2_grpc.EmbedServiceStub(channel).Embed(EMBED, timeout=30)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert len(times) == 1


async def test_a_server_that_drains_is_left_by_its_health(stack: Stack):
    """The channel sees NOT_SERVING by itself, before any call is refused."""
    async with channel_to(stack) as channel:
        await embed_pb2_grpc.EmbedServiceStub(channel).Embed(EMBED, timeout=30)
        assert channel.get_state() is grpc.ChannelConnectivity.READY
        stack.registry.drain()
        await asyncio.wait_for(channel.wait_for_state_change(grpc.ChannelConnectivity.READY), 10)


def test_the_file_is_a_service_config():
    """Against gRPC's own words for it; a typing error would leave everything out without a complaint."""
    config = json.loads(CONFIG)
    assert set(config) == {"loadBalancingConfig", "healthCheckConfig", "methodConfig", "retryThrottling"}
    for entry in config["methodConfig"]:
        assert set(entry) == {"name", "timeout", "retryPolicy"}
        policy = entry["retryPolicy"]
        assert set(policy) == {
            "maxAttempts",
            "initialBackoff",
            "maxBackoff",
            "backoffMultiplier",
            "retryableStatusCodes",
        }
        assert 2 <= policy["maxAttempts"] <= 5  # gRPC takes no more
