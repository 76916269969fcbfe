"""Spans of OpenTelemetry: one for a call, below the caller's own, and one below it for each stage of the call.

The packages of the extra ``otel`` are imported when tracing is asked for, and only then. Stages are made into spans at
the end of the call from the times that it has measured anyway, so that tokens cost nothing.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import re
import threading
import time
from collections.abc import Mapping
from typing import Any

from pyruntime.telemetry.call_record import CallRecord

log = logging.getLogger(__name__)

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
# What a shutdown waits for the spans of the last calls to be sent.
FLUSH_S = 3.0
# Of a server's span these codes are errors; the others are the caller's doing (semantic conventions for gRPC).
ERROR_CODES = {"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"}
_OPERATIONS = {"GenerateService": "text_completion", "EmbedService": "embeddings"}
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-[0-9a-f]{2}(?:-.*)?")


class TracingUnavailable(Exception):
    """Tracing was asked for and cannot be had; the message says why."""


def open_tracing(endpoint: str, environ: Mapping[str, str] = os.environ) -> Tracing | None:
    """Tracing to the collector at ``endpoint``, else to that of the standard variables, else None.

    Sampling, limits, the resource and the exporter's details follow the ``OTEL_`` variables. Raises
    ``TracingUnavailable`` when ``endpoint`` is given; what the variables ask for in vain is a warning.
    """
    asked = endpoint or next((environ[name] for name in ENDPOINT_VARIABLES if environ.get(name)), "")
    is_off = environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or environ.get("OTEL_TRACES_EXPORTER") == "none"
    if not asked or (is_off and not endpoint):
        return None
    protocol = next((environ[name] for name in PROTOCOL_VARIABLES if environ.get(name)), "grpc")
    try:
        if protocol != "grpc" and not endpoint:
            raise TracingUnavailable(f"spans are sent by OTLP over gRPC, not by {protocol}")
        return Tracing(endpoint or None)
    except ImportError as error:
        problem: Exception = TracingUnavailable(f"install the extra pyruntime[otel]: {error}")
    except (TracingUnavailable, ValueError) as error:
        problem = error
    if endpoint:
        raise TracingUnavailable(f"no traces: {problem}")
    log.warning("no traces: %s", problem)
    return None


class Tracing:
    """Begins and ends the spans of calls; sends them in batches from a thread of its own, with a bounded queue."""

    def __init__(self, endpoint: str | None) -> None:
        from opentelemetry import propagate, trace
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        # Its warnings quote headers, and tell of each try what the error tells after the last.
        logging.getLogger("opentelemetry").setLevel(logging.ERROR)
        self._api, self._extract = trace, propagate.extract
        self._exporter = OTLPSpanExporter(endpoint=endpoint)
        version = importlib.metadata.version("pyruntime")
        # Its own hook for the end of the process would wait half a minute for a collector that is away.
        self._provider = TracerProvider(resource=_resource(version), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("pyruntime", version)

    def begin(self, call: CallRecord, metadata: Mapping[str, str]) -> None:
        """Open the span of a call below the one that its metadata names, and give the call its ids."""
        call.span = self._tracer.start_span(
            call.method,
            self._extract(metadata),
            self._api.SpanKind.SERVER,
            {"rpc.system.name": "grpc", "rpc.method": call.method},
            start_time=call.began_ns,
        )
        context = call.span.get_span_context()
        call.trace_id, call.span_id = f"{context.trace_id:032x}", f"{context.span_id:016x}"
        call.stages = [] if call.span.is_recording() else None

    def end(self, call: CallRecord, code: str) -> None:
        """Close the span of a call that ended with the gRPC ``code``, its stages before it."""
        span, now = call.span, time.perf_counter()
        if call.stages is None:
            return
        context = self._api.set_span_in_context(span)
        for stage in call.stages:
            child = self._tracer.start_span(stage.name, context, start_time=_nanoseconds(call, stage.began, now))
            child.end(_nanoseconds(call, stage.ended, now))
        span.set_attributes(_attributes(call, code))
        if code in ERROR_CODES:
            span.set_status(self._api.Status(self._api.StatusCode.ERROR, call.reason or code))
        span.end(_nanoseconds(call, now, now))

    def close(self) -> None:
        """Send what waits, within ``FLUSH_S``; what a collector has not taken by then is dropped."""
        # Not one of the event loop's threads, which the end of the process would wait for.
        flush = threading.Thread(target=self._provider.shutdown, name="flush-traces", daemon=True)
        flush.start()
        flush.join(FLUSH_S)
        if flush.is_alive():
            self._exporter.shutdown()


def parse_traceparent(header: str) -> tuple[str, str]:
    """Trace id and the caller's span id of a W3C ``traceparent``; empty ones when it is not one."""
    match = _TRACEPARENT.fullmatch(header)
    return (match[1], match[2]) if match and not header.startswith("ff") else ("", "")


def _resource(version: str) -> Any:
    """What the environment says of this process; its service name is pyruntime unless that names it otherwise."""
    from opentelemetry.sdk.resources import Resource

    found = Resource.create({"service.version": version})
    if str(found.attributes["service.name"]).startswith("unknown_service"):
        found = found.merge(Resource({"service.name": "pyruntime"}))
    return found


def _attributes(call: CallRecord, code: str) -> dict[str, str | int]:
    """Names of the semantic conventions for RPC and generative AI, and of this project where those have none."""
    service = call.method.partition("/")[0].rpartition(".")[2]
    found: dict[str, str | int] = {
        "pyruntime.request_id": call.request_id,
        "pyruntime.reason": call.reason,
        "pyruntime.field": call.field,
        "error.type": code if code in ERROR_CODES else "",
        "gen_ai.operation.name": _OPERATIONS.get(service, "") if call.model else "",
        "gen_ai.request.model": call.model,
    }
    found = {name: value for name, value in found.items() if value}
    if call.num_requests:
        found |= {
            "gen_ai.usage.input_tokens": call.prompt_tokens,
            "gen_ai.usage.output_tokens": call.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": call.cached_tokens,
            "pyruntime.requests": call.num_requests,
        }
    return found | {"rpc.response.status_code": code}


def _nanoseconds(call: CallRecord, at: float, now: float) -> int:
    """Since 1970, of a moment between the beginning of the call and now."""
    inside = min(max(at, call.began), now)
    return call.began_ns + int((inside - call.began) * 1e9)
