"""A failed call as an exception that says what the server said."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

_DETAILS_KEY = "grpc-status-details-bin"


@dataclass(frozen=True)
class Violation:
    """One bad field: its path in the request, and what is wrong with it."""

    field: str
    description: str


class ApiError(Exception):
    """A call, or one item of a batch, that ended with an error.

    code            gRPC code name, as INVALID_ARGUMENT
    reason          the server's stable, machine-readable reason, as INVALID_FIELD; empty if it gave none
    violations      the bad fields, for INVALID_ARGUMENT
    retry_after_s   seconds after which a retry may succeed, or None
    """

    def __init__(
        self,
        code: str,
        message: str,
        reason: str = "",
        violations: tuple[Violation, ...] = (),
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.reason = reason
        self.violations = violations
        self.retry_after_s = retry_after_s

    @classmethod
    def from_status(cls, status: status_pb2.Status) -> ApiError:
        """From the ``google.rpc.Status`` of an item or a call."""
        code = next((each.name for each in grpc.StatusCode if each.value[0] == status.code), "UNKNOWN")
        reason, violations, retry = "", list[Violation](), None
        for detail in status.details:
            info, bad, delay = (
                error_details_pb2.ErrorInfo(),
                error_details_pb2.BadRequest(),
                error_details_pb2.RetryInfo(),
            )
            if detail.Unpack(info):
                reason = info.reason
            elif detail.Unpack(bad):
                violations += [Violation(each.field, each.description) for each in bad.field_violations]
            elif detail.Unpack(delay):
                retry = delay.retry_delay.ToTimedelta().total_seconds()
        return cls(code, status.message, reason, tuple(violations), retry)

    @classmethod
    def from_rpc(cls, error: Any) -> ApiError:
        """From the ``grpc.RpcError`` of a call. Errors of the connection itself carry a code and a message alone."""
        for key, value in error.trailing_metadata() or ():
            if key == _DETAILS_KEY:
                return cls.from_status(status_pb2.Status.FromString(value))
        return cls(error.code().name, error.details() or "")
