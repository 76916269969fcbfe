"""The one mapping from errors to gRPC status, with ``google.rpc`` details."""

from __future__ import annotations

import functools
import logging
import math

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2  # type: ignore[import-untyped]

from pyruntime import errors

log = logging.getLogger(__name__)

DOMAIN = "pyruntime"
DETAILS_KEY = "grpc-status-details-bin"
# By which gRPC's own retries go, those of a client's service config: milliseconds, or a negative number for "do not".
# https://github.com/grpc/proposal/blob/master/A6-client-retries.md
PUSHBACK_KEY = "grpc-retry-pushback-ms"
# A status travels in HTTP/2 trailers, of which peers take 8 KiB by default: the message, with up to three bytes for
# each of its own, and the details in base64.
MAX_MESSAGE_BYTES = 500
MAX_PROBLEM_BYTES = 200
MAX_VIOLATIONS = 12

_CODES: dict[type[errors.PyruntimeError], grpc.StatusCode] = {
    errors.InvalidField: grpc.StatusCode.INVALID_ARGUMENT,
    errors.InvalidFields: grpc.StatusCode.INVALID_ARGUMENT,
    errors.MalformedMessage: grpc.StatusCode.INVALID_ARGUMENT,
    errors.CredentialsMissing: grpc.StatusCode.UNAUTHENTICATED,
    errors.CredentialsWrong: grpc.StatusCode.UNAUTHENTICATED,
    errors.NotPermitted: grpc.StatusCode.PERMISSION_DENIED,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.AlreadyExists: grpc.StatusCode.ALREADY_EXISTS,
    errors.CapabilityMissing: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ModelFailed: grpc.StatusCode.FAILED_PRECONDITION,
    errors.Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.RequestTooLarge: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.ResponseTooLarge: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.NotReady: grpc.StatusCode.UNAVAILABLE,
    errors.DeadlinePassed: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.ClientStalled: grpc.StatusCode.CANCELLED,
    errors.RequestCancelled: grpc.StatusCode.CANCELLED,
    errors.ComputeFault: grpc.StatusCode.INTERNAL,
}


def clip(text: str, limit: int) -> str:
    """``text``, shortened in the middle to at most ``limit`` bytes of UTF-8."""
    raw = text.encode()
    if len(raw) <= limit:
        return text
    half = (limit - 3) // 2
    return f"{raw[:half].decode(errors='ignore')}...{raw[-half:].decode(errors='ignore')}"


def code_of(error: BaseException) -> grpc.StatusCode:
    """The gRPC code of an error; INTERNAL for whatever is not meant for clients."""
    for kind in type(error).__mro__:
        if kind in _CODES:
            return _CODES[kind]
    return grpc.StatusCode.INTERNAL


def to_status(error: BaseException) -> status_pb2.Status:
    """The error as a status: for a call, or for one item of a batch.

    An exception that is not a ``PyruntimeError`` is logged with its stack, of which the client sees nothing.
    """
    code = code_of(error).value[0]
    if not isinstance(error, errors.PyruntimeError):
        log.error("unexpected error while serving a request", exc_info=error)
        return status_pb2.Status(code=code_pb2.INTERNAL, message="internal error", details=[_info("INTERNAL")])
    details = [_info(error.reason), *_specific_details(error)]
    return status_pb2.Status(code=code, message=clip(error.message, MAX_MESSAGE_BYTES), details=details)


def retry_pushback(error: BaseException) -> tuple[tuple[str, str], ...]:
    """The trailer that says to gRPC's own retries what RetryInfo says to clients; empty for codes that none retries."""
    if isinstance(error, (errors.Overloaded, errors.NotReady)):
        return ((PUSHBACK_KEY, str(math.ceil(error.retry_after_s * 1000))),)
    if code_of(error) is grpc.StatusCode.RESOURCE_EXHAUSTED:  # too large, now and later
        return ((PUSHBACK_KEY, "-1"),)
    return ()


def _specific_details(error: errors.PyruntimeError) -> list[any_pb2.Any]:
    if isinstance(error, errors.InvalidField):
        return [_bad_request([error])]
    if isinstance(error, errors.InvalidFields):
        return [_bad_request(error.fields)]
    if isinstance(error, (errors.Overloaded, errors.NotReady)):
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        return [_pack(error_details_pb2.RetryInfo(retry_delay=delay))]
    if isinstance(error, errors.NotFound):
        name = clip(error.name, MAX_PROBLEM_BYTES)
        return [_pack(error_details_pb2.ResourceInfo(resource_type=error.resource, resource_name=name))]
    return []


def _bad_request(fields: list[errors.InvalidField]) -> any_pb2.Any:
    bad = error_details_pb2.BadRequest()
    for each in fields[:MAX_VIOLATIONS]:
        bad.field_violations.add(field=each.field, description=clip(each.problem, MAX_PROBLEM_BYTES))
    return _pack(bad)


@functools.cache  # reasons are constants
def _info(reason: str) -> any_pb2.Any:
    return _pack(error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN))


def request_info(request_id: str) -> any_pb2.Any:
    """The detail of a status that names the call."""
    return _pack(error_details_pb2.RequestInfo(request_id=request_id))


def _pack(message: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
