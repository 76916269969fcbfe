"""What is known of one gRPC call while it runs, for its log line and its spans. Knows nothing of gRPC.

The record follows the call through its tasks and worker threads in a context variable. It holds names, times and
counts, and never a text of the client's.
"""

from __future__ import annotations

import time
from contextvars import ContextVar
from typing import Any, NamedTuple

from pyruntime.errors import InvalidField, InvalidFields, PyruntimeError

# A stream may answer any number of requests; the stages of the first ones are kept.
MOST_STAGES = 64


class Stage(NamedTuple):
    """A part of a call's time; both ends in seconds of ``time.perf_counter``."""

    name: str
    began: float
    ended: float


class CallRecord:
    """One call, from its arrival on.

    method                            "package.Service/Method", or what stands for those that this server does not have
    request_id                        the name of the call in logs, traces and the answer
    is_named                          whether the metadata of the call gave it that name
    client_request_id                 what the request itself is called, when that is another name
    trace_id, span_id                 lower-case hex; empty without a trace
    model                             the served model; empty before it is known
    reason, field                     of the error that ended the call: its stable reason, the path of the bad field
    prompt_tokens, completion_tokens, cached_tokens, tokenize_s, queue_s, compute_s
                                      as in ``Usage`` and ``Timing``, summed over ``num_requests`` answered requests
    stages                            kept when the call is traced, else None
    span                              what the tracing made of the call, None without
    """

    def __init__(self, method: str, request_id: str) -> None:
        self.method = method
        self.request_id = request_id
        self.is_named = False
        self.client_request_id = ""
        self.began = time.perf_counter()
        self.began_ns = time.time_ns()
        self.trace_id = self.span_id = ""
        self.model = ""
        self.reason = self.field = ""
        self.num_requests = 0
        self.prompt_tokens = self.completion_tokens = self.cached_tokens = 0
        self.tokenize_s = self.queue_s = self.compute_s = 0.0
        self.stages: list[Stage] | None = None
        self.span: Any = None

    def add_stage(self, name: str, began: float, ended: float) -> None:
        if self.stages is not None and len(self.stages) < MOST_STAGES:
            self.stages.append(Stage(name, began, ended))

    def add_usage(self, prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> None:
        """Of one request that was answered, or broken off."""
        self.num_requests += 1
        self.prompt_tokens += prompt_tokens
        self.completion_tokens += completion_tokens
        self.cached_tokens += cached_tokens

    def note_error(self, error: BaseException) -> None:
        """Why the call ends. Of what is wrong with a field the path is kept: the rest may quote its value."""
        self.reason = error.reason if isinstance(error, PyruntimeError) else PyruntimeError.reason
        first = error.fields[0] if isinstance(error, InvalidFields) else error
        self.field = first.field if isinstance(first, InvalidField) else ""


_current: ContextVar[CallRecord | None] = ContextVar("pyruntime_call", default=None)


def begin_call(record: CallRecord) -> None:
    """``record`` is the call of this task, of tasks that it makes and of what it gives to workers."""
    _current.set(record)


def current_call() -> CallRecord | None:
    return _current.get()


def current_id() -> str:
    """The name of the call; empty outside of one."""
    call = _current.get()
    return call.request_id if call is not None else ""
