"""A real server on a free port, over fake engines."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pyruntime.config import Settings
from pyruntime.registry import ModelRegistry, ServedModel
from pyruntime.service.server_builder import RuntimeServer, build_server
from pyruntime.types import Capability
from pyruntime.v1 import embed_pb2_grpc, generate_pb2_grpc, model_pb2_grpc, score_pb2_grpc
from tests.fakes import FakeEngine, fake_model


@dataclass
class Stack:
    """The server, what is behind it and a channel to it."""

    registry: ModelRegistry
    server: RuntimeServer
    channel: grpc.aio.Channel
    decoder: ServedModel
    encoder: ServedModel

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    @property
    def engine(self) -> FakeEngine:
        return self.decoder.engine  # type: ignore[return-value]

    def __post_init__(self) -> None:
        self.generate = generate_pb2_grpc.GenerateServiceStub(self.channel)
        self.embed = embed_pb2_grpc.EmbedServiceStub(self.channel)
        self.score = score_pb2_grpc.ScoreServiceStub(self.channel)
        self.models = model_pb2_grpc.ModelServiceStub(self.channel)
        self.health = health_pb2_grpc.HealthStub(self.channel)


SETTINGS = Settings(
    port=0,
    max_text_bytes=1000,
    max_request_text_bytes=3000,
    max_inputs_per_request=8,
    max_labels_per_request=10,
    max_scores_per_request=20,
    max_message_bytes=100_000,
)


@pytest.fixture(autouse=True)
def nothing_stays_kept_from_the_collector() -> Iterator[None]:
    """As a load leaves it: other tests count objects."""
    yield
    gc.unfreeze()


@pytest.fixture
async def bare() -> AsyncIterator[Stack]:
    """No model declared yet."""
    registry = ModelRegistry()
    server = build_server(registry, SETTINGS)
    port = await server.start()
    decoder = fake_model("decoder", {Capability.GENERATE, Capability.SCORE, Capability.EMBED})
    encoder = fake_model("encoder", {Capability.EMBED}, default_prompt_name="query")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield Stack(registry, server, channel, decoder, encoder)
    await server.drain(0)


@pytest.fixture
async def stack(bare: Stack) -> Stack:
    """Both models serving."""
    for model in (bare.decoder, bare.encoder):
        bare.registry.declare(model.info.name)
        bare.registry.set_serving(model.info.name, model)
    return bare


@contextlib.asynccontextmanager
async def health_ends(port: int, service: str = "") -> AsyncIterator[grpc.aio.Channel]:
    """A channel to the server of this port, once the service serves there; with the block it must cease to."""
    states = health_pb2.HealthCheckResponse
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        await asyncio.wait_for(channel.channel_ready(), 10)
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=service))
        while (await asyncio.wait_for(watch.read(), 10)).status != states.SERVING:
            pass
        yield channel
        assert (await asyncio.wait_for(watch.read(), 10)).status == states.NOT_SERVING
        watch.cancel()


@dataclass
class Failure:
    """A call's error with its details unpacked."""

    code: grpc.StatusCode
    message: str
    reason: str
    violations: dict[str, str]
    retry_s: float | None


def unpack(status: status_pb2.Status) -> Failure:
    code = next(each for each in grpc.StatusCode if each.value[0] == status.code)
    failure = Failure(code, status.message, "", {}, None)
    for detail in status.details:
        info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            assert info.domain == "pyruntime"
            failure.reason = info.reason
        elif detail.Unpack(bad):
            failure.violations = {each.field: each.description for each in bad.field_violations}
        elif detail.Unpack(retry):
            failure.retry_s = retry.retry_delay.ToTimedelta().total_seconds()
    return failure


async def failure_of(call) -> Failure:
    """The failure of a unary call, or of a stream's first read."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        if isinstance(call, grpc.aio.UnaryStreamCall):
            while await call.read() is not grpc.aio.EOF:
                pass
        else:
            await call
    error = caught.value
    status = dict(error.trailing_metadata())["grpc-status-details-bin"]
    failure = unpack(status_pb2.Status.FromString(status))
    assert failure.code == error.code()
    return failure
