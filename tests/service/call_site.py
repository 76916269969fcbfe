"""A server over real engines with a fake model, whose log lines and traces are kept."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import string
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from pyruntime.config import Settings
from pyruntime.engine import Engine
from pyruntime.registry import GenerationDefaults, ModelRegistry, ServedModel
from pyruntime.scheduler.blocks import BlockPool
from pyruntime.scheduler.scheduler import Scheduler
from pyruntime.service.server_builder import build_server
from pyruntime.telemetry.logs import JsonFormatter, TextFormatter
from pyruntime.telemetry.tracing import Tracing
from pyruntime.types import Capability, SampledToken, Task
from tests.fake_compute import FakeModel
from tests.fakes import EOS, byte_tokenizer, fake_model
from tests.service.conftest import Stack

ABLE = {Capability.GENERATE, Capability.EMBED, Capability.SCORE}


class Answers(FakeModel):
    """Continues every prompt with the alphabet, embeds every text as ones, gives every label an equal share."""

    def read(self, hidden: Any, batch: Any) -> list[Any]:
        return [self._answer(rows.sequence) for rows in batch.rows if rows.reads]

    def _answer(self, sequence: Any) -> Any:
        if sequence.task is Task.GENERATE:
            return SampledToken(ord(string.ascii_lowercase[sequence.num_generated % 26]), -0.5)
        if sequence.task is Task.EMBED:
            return np.ones(12, np.float32)
        return [0.5] * len(sequence.payload.label_ids)


@contextlib.asynccontextmanager
async def call_site(settings: Settings, tracing: Tracing | None = None) -> AsyncIterator[tuple[Stack, Answers]]:
    """The server with a channel to it, and the model behind it."""
    compute = Answers()
    info = fake_model("decoder", ABLE, context_length=4000).info
    engine = Engine(info, Scheduler(BlockPool(2000, 16), 2048, 64), compute, compute, compute)
    model = ServedModel(info, engine, byte_tokenizer(), GenerationDefaults(eos_token_ids=frozenset({EOS})))
    registry = ModelRegistry()
    registry.declare("decoder")
    registry.set_serving("decoder", model)
    server = build_server(registry, settings, tracing=tracing)
    port = await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield Stack(registry, server, channel, model, model), compute
    finally:
        await server.drain(0)
        engine.close()


class Log:
    """What the whole process logs meanwhile, in both forms."""

    def __init__(self) -> None:
        self._json, self._text = io.StringIO(), io.StringIO()

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._json.getvalue().splitlines()]

    @property
    def calls(self) -> list[dict[str, Any]]:
        """Of the calls that have ended, the oldest first."""
        return [line for line in self.lines if line["logger"] == "pyruntime.access"]

    @property
    def raw(self) -> str:
        return self._json.getvalue() + self._text.getvalue()

    @contextlib.contextmanager
    def kept(self, log_texts: bool = False) -> Iterator[Log]:
        """From the least level on."""
        root = logging.getLogger()
        handlers = [logging.StreamHandler(self._json), logging.StreamHandler(self._text)]
        for handler, form in zip(handlers, (JsonFormatter, TextFormatter), strict=True):
            handler.setFormatter(form(log_texts))
            root.addHandler(handler)
        level = root.level
        root.setLevel(logging.DEBUG)
        try:
            yield self
        finally:
            root.setLevel(level)
            for handler in handlers:
                root.removeHandler(handler)


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Takes spans by OTLP over gRPC, as a collector does."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resource: dict[str, str] = {}
        self._server = grpc.server(ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:
        for part in request.resource_spans:
            self.resource = {each.key: each.value.string_value for each in part.resource.attributes}
            self.spans += [span for scope in part.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def call(self, method: str) -> Any:
        """The span of the one call to a method whose full name ends so."""
        (found,) = [span for span in self.spans if span.name.endswith(method)]
        return found

    def stages(self, call: Any) -> list[Any]:
        """The spans below that of a call, in order of their beginning."""
        below = [span for span in self.spans if span.parent_span_id == call.span_id]
        return sorted(below, key=lambda span: (span.start_time_unix_nano, span.end_time_unix_nano))

    def __enter__(self) -> Collector:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(None)


def attributes(span: Any) -> dict[str, Any]:
    """Each with its value, a text or a whole number."""
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}
