"""Two servers over fake engines, to stand behind a proxy that is a real program."""

from __future__ import annotations

import asyncio
import contextlib
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pyruntime.config import Settings
from pyruntime.registry import ModelRegistry
from pyruntime.service.server_builder import RuntimeServer, build_server
from pyruntime.types import Capability, GenerateRequest, ModelInfo
from pyruntime.v1 import embed_pb2_grpc, generate_pb2, generate_pb2_grpc, model_pb2_grpc
from tests.fakes import FakeEngine, FakeStream, fake_model, play

ROOT = Path(__file__).resolve().parents[2]
TEXT = "hello from here"
Chunk = generate_pb2.GenerateChunk


# Requests for as many tokens are held halfway.
HELD = 7


class HeldEngine(FakeEngine):
    """Continues everything by ``TEXT``; requests for ``HELD`` tokens stop halfway until ``go`` is set."""

    def __init__(self, info: ModelInfo) -> None:
        super().__init__(info)
        self.go = asyncio.Event()

    def generate(self, request: GenerateRequest, **rest: object) -> FakeStream:
        self.next_stream = play(TEXT)
        if request.stop.max_new_tokens == HELD:
            self.next_stream.hold = 5
            self.next_stream.stopped = self.go
        return super().generate(request, **rest)  # type: ignore[arg-type]


@dataclass
class Replica:
    """One server. ``calls``: how many requests its engine has seen."""

    registry: ModelRegistry
    server: RuntimeServer
    engine: HeldEngine

    @property
    def calls(self) -> int:
        return len(self.engine.generated) + len(self.engine.embedded)


async def start_replica(settings: Settings | None = None) -> Replica:
    registry = ModelRegistry()
    server = build_server(registry, settings or Settings(port=0))
    await server.start()
    model = fake_model("m", {Capability.GENERATE, Capability.EMBED})
    engine = HeldEngine(model.info)
    model.engine = engine  # type: ignore[assignment]
    registry.declare("m")
    registry.set_serving("m", model)
    return Replica(registry, server, engine)


@dataclass
class Stubs:
    """The services behind a channel."""

    channel: grpc.aio.Channel
    generate: generate_pb2_grpc.GenerateServiceStub = field(init=False)

    def __post_init__(self) -> None:
        self.generate = generate_pb2_grpc.GenerateServiceStub(self.channel)
        self.embed = embed_pb2_grpc.EmbedServiceStub(self.channel)
        self.models = model_pb2_grpc.ModelServiceStub(self.channel)

    async def held(self, count: int) -> tuple[list[AsyncIterator[Chunk]], list[Chunk]]:
        """Streams that are stopped halfway, each with its first chunk.

        Each has begun before the next is sent: a proxy counts a call for a replica only once it is connected to it.
        """
        streams, first = [], []
        for _ in range(count):
            streams.append(aiter(self.generate.GenerateStream(held_request())))
            first.append(await anext(streams[-1]))
        return streams, first


def held_request() -> generate_pb2.GenerateRequest:
    return generate_pb2.GenerateRequest(text="hi", stop=generate_pb2.Stop(max_new_tokens=HELD))


def text_of(chunks: list[Chunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


async def until(ask: Callable[[], Awaitable[int]], at_least: int) -> None:
    """Asks again and again; a TimeoutError after 20 s."""
    async with asyncio.timeout(20):
        while await ask() < at_least:
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def connected(port: int, credentials: grpc.ChannelCredentials | None = None) -> AsyncIterator[grpc.aio.Channel]:
    """A channel through a proxy, once a replica behind it has said that it serves."""
    # Tries often: a proxy that has just been started refuses at first.
    options = [("grpc.initial_reconnect_backoff_ms", 50), ("grpc.max_reconnect_backoff_ms", 200)]
    address = f"localhost:{port}"
    if credentials is None:
        made = grpc.aio.insecure_channel(address, options)
    else:
        made = grpc.aio.secure_channel(address, credentials, options)
    async with made as channel:
        health = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=30)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        yield channel


@contextlib.asynccontextmanager
async def two_replicas(settings: Settings | None = None) -> AsyncIterator[list[Replica]]:
    replicas = [await start_replica(settings) for _ in range(2)]
    try:
        yield replicas
    finally:
        for replica in replicas:
            replica.engine.go.set()
            await replica.server.drain(0)


@contextlib.asynccontextmanager
async def running(*command: str, log: Path) -> AsyncIterator[None]:
    """A program while the block runs; what it prints goes to ``log``."""
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(*command, stdout=output, stderr=STDOUT, stdin=PIPE)
        try:
            yield
            assert process.returncode is None, f"{command[0]} ended by itself, see {log}"
        finally:
            if process.returncode is None:
                process.terminate()
            try:
                await asyncio.wait_for(process.wait(), 10)
            except TimeoutError:
                process.kill()
                await process.wait()


@contextlib.asynccontextmanager
async def behind_a_proxy(
    command: Callable[[list[int]], Sequence[str]],
    port: int,
    log: Path,
    *,
    settings: Settings | None = None,
    credentials: grpc.ChannelCredentials | None = None,
) -> AsyncIterator[tuple[list[Replica], Stubs]]:
    """Two replicas and, through the program that listens on ``port``, their services.

    ``command``: writes the program's files for the replicas' ports, and says how it is started.
    """
    async with two_replicas(settings) as replicas:
        words = command([replica.server.port for replica in replicas])
        async with running(*words, log=log), connected(port, credentials) as channel:
            yield replicas, Stubs(channel)
