"""The name of a call in logs, traces and its answer: the client's, or one that is made."""

from __future__ import annotations

import os
import re
from typing import Any

from pyruntime.service.validate import MAX_REQUEST_ID_BYTES
from pyruntime.telemetry.call_record import CallRecord

# Metadata of the call, and in the trailers of its answer.
REQUEST_ID_KEY = "x-request-id"
# Visible ASCII: what metadata can carry and what cannot break a log line.
_CLEAN = re.compile(rf"[\x21-\x7e]{{1,{MAX_REQUEST_ID_BYTES}}}")


def is_clean(value: object) -> bool:
    return isinstance(value, str) and _CLEAN.fullmatch(value) is not None


def make_id() -> str:
    return os.urandom(16).hex()


def name_after_request(call: CallRecord, request: Any) -> bool:
    """What the ``request_id`` field of the call's one request does: it names a call that its metadata does not.

    Beside an id of the metadata it is the request's other name. One that is not clean names nothing: metadata could not
    carry it back. Returns whether the call has a new name.
    """
    field = getattr(request, "request_id", "")
    if not field or field == call.request_id or not is_clean(field):
        return False
    if call.is_named:
        call.client_request_id = field
        return False
    call.request_id = field
    return True
