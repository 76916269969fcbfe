"""Around every call, of whichever service: its id, its record, its counters, its span and its line in the log.

Outermost of all, so that no call ends unseen: neither one that is refused, nor one whose request never arrives whole.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf import text_format
from grpc_health.v1 import health_pb2

from pyruntime.config import Settings
from pyruntime.errors import DeadlinePassed
from pyruntime.service.arrival import Arrivals
from pyruntime.service.interceptor import HANDLERS
from pyruntime.service.reflection import V1, V1ALPHA
from pyruntime.service.request_id import REQUEST_ID_KEY, is_clean, make_id, name_after_request
from pyruntime.telemetry.call_record import CallRecord, begin_call, current_call
from pyruntime.telemetry.calls import UNKNOWN, CallStats
from pyruntime.telemetry.quota import LineQuota
from pyruntime.telemetry.tracing import Tracing, parse_traceparent
from pyruntime.v1 import admin_pb2, embed_pb2, generate_pb2, model_pb2, score_pb2

log = logging.getLogger("pyruntime.access")

# Codes that are the server's own fault.
FAULTS = {"UNKNOWN", "INTERNAL", "DATA_LOSS"}
# A client gives up at its deadline, and this may arrive here before the deadline does, which began later.
DEADLINE_SLACK_S = 0.1
# Requests of more bytes than this are not shown, also where texts are.
MOST_SHOWN_BYTES = 16 * 1024

Method = Callable[..., Any]

FILES = (generate_pb2, embed_pb2, score_pb2, model_pb2, admin_pb2, health_pb2)
METHODS = frozenset(
    f"/{service.full_name}/{method.name}"
    for file in FILES
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
) | {f"/{name}/ServerReflectionInfo" for name in (V1, V1ALPHA)}


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Whatever the others decide happens inside the call's record.

    ``calls``: where they are counted. ``tracing``: None makes no spans. Of the settings: how long a request may take to
    arrive, whether there is a line for each call, and whether it shows the request and, where that failed, the message
    of the error. Costs nothing a message.
    """

    def __init__(self, settings: Settings, calls: CallStats, tracing: Tracing | None) -> None:
        self._calls = calls
        self._tracing = tracing
        self._arrivals = Arrivals(settings.client_stall_s)
        self._log_calls = settings.access_log
        self._log_texts = settings.log_texts
        self._quota = LineQuota()
        # By the handler that was wrapped: an interceptor behind this one may answer with another one at any call.
        self._wrapped: dict[str, tuple[Any, grpc.RpcMethodHandler]] = {}
        self._missing = grpc.stream_stream_rpc_method_handler(self._around(_no_such_method, reads=False))

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        path = handler_call_details.method
        is_known = path in METHODS
        self._begin(path.removeprefix("/") if is_known else UNKNOWN, handler_call_details.invocation_metadata)
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return self._missing
        if not is_known:
            return self._wrap(handler)
        inner, outer = self._wrapped.get(path, (None, None))
        if inner is not handler or outer is None:
            outer = self._wrap(handler)
            self._wrapped[path] = handler, outer
        return outer

    def _begin(self, method: str, metadata: Any) -> None:
        given = {key: value for key, value in metadata or () if isinstance(value, str)}
        request_id = given.get(REQUEST_ID_KEY, "")
        call = CallRecord(method, request_id if is_clean(request_id) else make_id())
        call.is_named = call.request_id == request_id
        if self._tracing is not None and not _is_probe(call):
            self._tracing.begin(call, given)
        elif "traceparent" in given:
            call.trace_id, call.span_id = parse_traceparent(given["traceparent"])
        begin_call(call)

    def _wrap(self, handler: Any) -> grpc.RpcMethodHandler:
        """The handler as one that is given a stream, of which ``Arrivals`` reads the one message that it wants."""
        codec = {
            "request_deserializer": handler.request_deserializer,
            "response_serializer": handler.response_serializer,
        }
        method = handler.stream_stream or handler.unary_stream or handler.stream_unary or handler.unary_unary
        make = HANDLERS[True, handler.response_streaming]
        return make(self._around(method, reads=not handler.request_streaming), **codec)

    def _around(self, method: Method, reads: bool) -> Callable[..., Awaitable[Any]]:
        run = _writing(method) if inspect.isasyncgenfunction(method) else method

        async def answer(request: Any, context: grpc.aio.ServicerContext) -> Any:
            call = current_call()
            assert call is not None
            context.set_trailing_metadata(((REQUEST_ID_KEY, call.request_id),))
            fallback = "OK"
            self._calls.begin(call.method)
            try:
                if reads:
                    request = await self._arrivals.read(context)
                    if name_after_request(call, request):
                        context.set_trailing_metadata(((REQUEST_ID_KEY, call.request_id),))
                return await run(request, context)
            except asyncio.CancelledError:
                fallback = why_cancelled(context)
                if fallback == "DEADLINE_EXCEEDED" and not call.reason:  # as when the engine sees it first
                    call.reason = DeadlinePassed.reason
                raise
            except grpc.aio.InternalError:  # it has gone; grpc would log that with its stack, and try to tell it
                fallback = "CANCELLED"
                raise asyncio.CancelledError from None
            except BaseException:  # an abort has its code; grpc answers anything else so
                fallback = "UNKNOWN"
                raise
            finally:
                self._end(call, _code(context) or fallback, request, context)

        return answer

    def _end(self, call: CallRecord, code: str, request: Any, context: grpc.aio.ServicerContext) -> None:
        seconds = time.perf_counter() - call.began
        self._calls.end(call.method, seconds, code, call.reason)
        if self._tracing is not None and call.span is not None:
            self._tracing.end(call, code)
        level = _level(call, code)
        if self._log_calls and log.isEnabledFor(level):
            left_out = self._quota.take((call.method, code, call.reason)) if _is_cheap(call, code) else 0
            if left_out is None:
                return
            tell = functools.partial(self._log, level, call, code, seconds, left_out, request, context)
            if code == "OK":  # its status is still to be sent, and no client need wait for a line in a log
                asyncio.get_running_loop().call_soon(tell)
            else:
                tell()

    def _log(
        self,
        level: int,
        call: CallRecord,
        code: str,
        seconds: float,
        left_out: int,
        request: Any,
        context: grpc.aio.ServicerContext,
    ) -> None:
        fields = _fields(call, code, seconds)
        if left_out:
            fields["left_out"] = left_out
        if self._log_texts:
            fields |= {"error": context.details(), "request": _shown(request)}
        log.log(level, "call", extra={"fields": {name: value for name, value in fields.items() if value != ""}})


def _writing(method: Method) -> Method:
    """An async generator as a coroutine that writes, which is cancelled at once."""

    async def write(request: Any, context: grpc.aio.ServicerContext) -> None:
        async for message in method(request, context):
            await context.write(message)

    return write


async def _no_such_method(request: Any, context: grpc.aio.ServicerContext) -> None:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this server has no such method")


def _code(context: grpc.aio.ServicerContext) -> str:
    """The name of the code that the call was ended with; empty while it has none or is OK."""
    code: Any = context.code()
    return code.name if isinstance(code, grpc.StatusCode) and code is not grpc.StatusCode.OK else ""


def why_cancelled(context: grpc.aio.ServicerContext) -> str:
    """The code of a call that has ended without one."""
    remaining_s = context.time_remaining()
    return "CANCELLED" if remaining_s is None or remaining_s > DEADLINE_SLACK_S else "DEADLINE_EXCEEDED"


def _is_probe(call: CallRecord) -> bool:
    """Health checks and reflection come at any rate and say nothing about the models."""
    return call.method.startswith("grpc.")


def _is_cheap(call: CallRecord, code: str) -> bool:
    """A client can have any number of such calls: they end without an answer, and not by a fault of the server."""
    return code != "OK" and code not in FAULTS and call.num_requests == 0


def _level(call: CallRecord, code: str) -> int:
    if code in FAULTS:
        return logging.WARNING
    return logging.DEBUG if _is_probe(call) else logging.INFO


def _fields(call: CallRecord, code: str, seconds: float) -> dict[str, Any]:
    """What the line says beside the ids; empty values are left out."""
    fields: dict[str, Any] = {
        "method": call.method,
        "code": code,
        "reason": call.reason,
        "field": call.field,
        "duration_ms": _ms(seconds),
        "model": call.model,
        "client_request_id": call.client_request_id,
    }
    if call.num_requests:
        fields |= {
            "requests": call.num_requests,
            "prompt_tokens": call.prompt_tokens,
            "completion_tokens": call.completion_tokens,
            "cached_tokens": call.cached_tokens,
            "tokenize_ms": _ms(call.tokenize_s),
            "queue_ms": _ms(call.queue_s),
            "compute_ms": _ms(call.compute_s),
        }
    return fields


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def _shown(request: Any) -> str:
    """The request as text, on one line; empty for a stream of them."""
    if not hasattr(request, "ByteSize"):
        return ""
    size = request.ByteSize()
    if size > MOST_SHOWN_BYTES:
        return f"{size} bytes"
    return text_format.MessageToString(request, as_one_line=True, as_utf8=True)
