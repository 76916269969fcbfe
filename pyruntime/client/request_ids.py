"""The name of a call, by which it is found in the server's log and traces."""

from __future__ import annotations

import re
import uuid
from typing import Any

# Metadata of the call and of its answer.
REQUEST_ID_KEY = "x-request-id"
# What metadata can carry, and as long as ``request_id`` may be.
_SENDABLE = re.compile(r"[\x21-\x7e]{1,256}")


def request_id_of(request: Any) -> str:
    """The id that the caller gave in the request's ``request_id``, where metadata can carry it; else a new one."""
    return sendable(getattr(request, "request_id", ""))


def sendable(given: str | None) -> str:
    return given if given and _SENDABLE.fullmatch(given) else uuid.uuid4().hex


def metadata_of(request_id: str) -> tuple[tuple[str, str], ...]:
    return ((REQUEST_ID_KEY, request_id),)
