"""A failed call as an exception that says what the server said."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from pyruntime.client.request_ids import REQUEST_ID_KEY

_DETAILS_KEY = "grpc-status-details-bin"
# How the path of what is wrong with one entry of a batch begins.
_PLACE = re.compile(r"(inputs|items|documents|pairs)\[(\d+)\]")


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
    request_id      names the call in the server's log and traces; empty for an item of a batch
    """

    def __init__(
        self,
        code: str,
        message: str,
        reason: str = "",
        violations: tuple[Violation, ...] = (),
        retry_after_s: float | None = None,
        request_id: str = "",
    ) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.reason = reason
        self.violations = violations
        self.retry_after_s = retry_after_s
        self.request_id = request_id

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
    def from_rpc(cls, error: Any, request_id: str = "") -> ApiError:
        """From the ``grpc.RpcError`` of a call. Errors of the connection itself carry a code and a message alone.

        ``request_id``: what the call was sent with; the server's word for it goes first.
        """
        trailing = dict(error.trailing_metadata() or ())
        if _DETAILS_KEY in trailing:
            made = cls.from_status(status_pb2.Status.FromString(trailing[_DETAILS_KEY]))
        else:
            made = cls(error.code().name, error.details() or "")
        made.request_id = str(trailing.get(REQUEST_ID_KEY, request_id))
        return made

    def renumber(self, number: Callable[[int], int]) -> None:
        """Calls the entry that it is about ``number`` of what it was: the call had a part of the caller's entries."""

        def moved(path: str) -> str:
            found = _PLACE.match(path)
            return f"{found[1]}[{number(int(found[2]))}]{path[found.end() :]}" if found else path

        self.message = moved(self.message)
        self.args = (f"{self.code}: {self.message}",)
        self.violations = tuple(replace(each, field=moved(each.field)) for each in self.violations)


def closed_error() -> ApiError:
    return ApiError("CANCELLED", "the client is closed")


def ended_early_error() -> ApiError:
    """What no server of this project does: an orderly end before everything is answered."""
    return ApiError("INTERNAL", "the server ended the stream before it had answered everything")
