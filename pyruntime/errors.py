"""Every error a client can see, one type each.

Nothing here knows gRPC: ``service/status.py`` maps each type to a status code and attaches the
``google.rpc`` details. ``reason`` is stable and machine readable; clients may branch on it.
"""

from __future__ import annotations


class PyruntimeError(Exception):
    """Base of all errors that reach a client. ``reason`` names the kind in UPPER_SNAKE_CASE."""

    reason = "INTERNAL"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class InvalidField(PyruntimeError):
    """A request field is malformed or out of range. ``field`` is its proto path, as ``sampling.top_p``."""

    reason = "INVALID_FIELD"

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class InvalidFields(PyruntimeError):
    """Several fields are bad; none of the request is served."""

    reason = "INVALID_FIELD"

    def __init__(self, fields: list[InvalidField]) -> None:
        more = f" (and {len(fields) - 1} more)" if len(fields) > 1 else ""
        super().__init__(fields[0].message + more)
        self.fields = fields


class NotFound(PyruntimeError):
    """The request names something that this server does not have (a model, a prompt name)."""

    reason = "NOT_FOUND"

    def __init__(self, resource: str, name: str, known: list[str]) -> None:
        known_text = ", ".join(sorted(known)) or "none"
        super().__init__(f"unknown {resource} {name!r}; known: {known_text}")
        self.resource = resource
        self.name = name


class CapabilityMissing(PyruntimeError):
    """The model exists but cannot do what the request asks."""

    reason = "CAPABILITY_MISSING"


class AlreadyExists(PyruntimeError):
    """A model of that name is there, in whichever state but failed."""

    reason = "ALREADY_EXISTS"


class ModelFailed(PyruntimeError):
    """The server was told to serve this model, but loading it failed."""

    reason = "MODEL_FAILED"


class _RetryLater(PyruntimeError):
    """``retry_after_s`` is when a retry is likely to be accepted, in seconds."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Overloaded(_RetryLater):
    """The queue is full. ``retry_after_s`` is when a retry is likely to be accepted, in seconds."""

    reason = "OVERLOADED"


class ResponseTooLarge(PyruntimeError):
    """The answer is larger than one message may be."""

    reason = "RESPONSE_TOO_LARGE"


class RequestTooLarge(PyruntimeError):
    """The request has more bytes, once decompressed, or more fields than one may have."""

    reason = "REQUEST_TOO_LARGE"


class MalformedMessage(PyruntimeError):
    """The bytes of the request are no message of its type."""

    reason = "MALFORMED_MESSAGE"


class CredentialsMissing(PyruntimeError):
    """The call carries no bearer token, and this method asks for one."""

    reason = "CREDENTIALS_MISSING"


class CredentialsWrong(PyruntimeError):
    """The call carries a token that this server does not know (any more)."""

    reason = "CREDENTIALS_WRONG"


class NotPermitted(PyruntimeError):
    """The token is known, but not for this method."""

    reason = "NOT_PERMITTED"


class ClientStalled(PyruntimeError):
    """The client has read nothing of its stream, or not sent its request, for too long; the work was stopped."""

    reason = "CLIENT_STALLED"


class NotReady(_RetryLater):
    """The server or model is loading or draining; ``retry_after_s`` in seconds."""

    reason = "NOT_READY"


class DeadlinePassed(PyruntimeError):
    """The client's deadline passed before the answer was ready, or is sure to."""

    reason = "DEADLINE_PASSED"


class RequestCancelled(PyruntimeError):
    """The client went away; the work was stopped."""

    reason = "CANCELLED"


class ComputeFault(PyruntimeError):
    """The forward failed or produced NaN or infinity for this request."""

    reason = "COMPUTE_FAULT"


class UnsafeTransport(Exception):
    """The server must not listen with these settings, for the reason given. Seen by the operator alone."""


class ModelLoadError(PyruntimeError):
    """A model cannot be served right, so it is refused at load with the reason. Seen by the operator."""

    reason = "MODEL_LOAD"
