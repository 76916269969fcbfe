"""How log lines look: text for people, or JSON with one object a line. Both carry the ids of the call they belong to.

An exception's message may quote what a client sent, so of what is logged inside a call, the place and the type of an
exception are shown and its message is not, unless the operator asks for texts.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import threading
import time
import traceback
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

from pyruntime.telemetry.call_record import current_call

TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
# A collector of traces that is away is complained about by each batch.
SELDOM, SELDOM_S = "opentelemetry", 60.0

log = logging.getLogger("pyruntime")


def configure_logging(level: str, log_format: str, log_texts: bool) -> None:
    """Every log line of the process, warnings and uncaught exceptions included, to standard error in one form.

    ``level``: the least that is logged, as "info". ``log_format``: "text" or "json". ``log_texts``: whether messages
    of exceptions inside calls are shown.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(log_texts) if log_format == "json" else TextFormatter(log_texts))
    handler.addFilter(Seldom(SELDOM, SELDOM_S))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.captureWarnings(True)
    keep_paths_out()
    if log_format == "json":  # progress bars of libraries, which are imported later, are no log lines
        os.environ.setdefault("TQDM_DISABLE", "1")
    sys.excepthook = _uncaught
    threading.excepthook = lambda args: _uncaught(args.exc_type, args.exc_value, args.exc_traceback)


def keep_paths_out() -> None:
    """grpc quotes metadata and paths of methods that are no UTF-8, with a stack for each; such a call ends anyway."""
    logger = logging.getLogger("grpc._cython.cygrpc")
    logger.addFilter(_quotes_no_client)
    logger.setLevel(logging.INFO)  # below that it quotes paths too


def _quotes_no_client(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(("Invalid encoding", "Unexpected [UnicodeDecodeError]"))


def writes_json() -> bool:
    """Whether the log is for machines."""
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)


def log_loop_errors(loop: asyncio.AbstractEventLoop) -> None:
    """What nobody awaited fails with a log line of ours: asyncio's own one prints the exception, message and all."""

    def tell(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        log.error("%s", context["message"], exc_info=context.get("exception"), extra={"hide_message": True})

    loop.set_exception_handler(tell)


class TextFormatter(logging.Formatter):
    """The usual line of the logging module, and behind it what belongs to the event and its call as NAME=VALUE."""

    def __init__(self, log_texts: bool) -> None:
        super().__init__(TEXT_FORMAT)
        self._log_texts = log_texts

    def formatMessage(self, record: logging.LogRecord) -> str:
        named = {**getattr(record, "fields", {}), **_ids()}
        return " ".join([super().formatMessage(record), *(f"{name}={_plain(value)}" for name, value in named.items())])

    def format(self, record: logging.LogRecord) -> str:
        record.exc_text = None  # what a formatter of another kind has kept there
        if record.exc_info and _hides(record, self._log_texts):
            record.exc_text = stack_of(record.exc_info[1])
        return super().format(record)


class JsonFormatter(logging.Formatter):
    """One JSON object a line, in ASCII: time (RFC 3339, UTC), level, logger, message, the event's own fields, ids.

    ``stack``: of an exception, its calls and types.
    """

    def __init__(self, log_texts: bool) -> None:
        super().__init__()
        self._log_texts = log_texts

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
            **_ids(),
        }
        if record.exc_info and record.exc_info[1] is not None:
            hides = _hides(record, self._log_texts)
            line["stack"] = stack_of(record.exc_info[1]) if hides else self.formatException(record.exc_info)
        elif record.stack_info:
            line["stack"] = record.stack_info
        return json.dumps(line, default=str)


class Seldom(logging.Filter):
    """Lets one record through in ``seconds`` of those whose logger is ``name`` or below it, and all of others."""

    def __init__(self, name: str, seconds: float) -> None:
        super().__init__()
        self._seldom, self._seconds = logging.Filter(name), seconds
        self._next_at = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        if not self._seldom.filter(record):
            return True
        now = time.monotonic()
        if now < self._next_at:
            return False
        self._next_at = now + self._seconds
        return True


def stack_of(error: BaseException | None) -> str:
    """The error and what caused it, the first cause first: for each its calls and its type, without its message."""
    parts: list[str] = []
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        kind = type(error)
        calls = "".join(traceback.format_tb(error.__traceback__))
        parts.append(f"{calls}{kind.__module__}.{kind.__qualname__}")
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return "\n".join(reversed(parts))


def _ids() -> dict[str, str]:
    call = current_call()
    if call is None:
        return {}
    ids = {"request_id": call.request_id, "trace_id": call.trace_id, "span_id": call.span_id}
    return {name: value for name, value in ids.items() if value}


def _hides(record: logging.LogRecord, log_texts: bool) -> bool:
    return not log_texts and (current_call() is not None or getattr(record, "hide_message", False))


def _plain(value: object) -> str:
    """On one line: as it is when it is a word or a number, else quoted."""
    text = str(value)
    return text if text.isascii() and text.isprintable() and " " not in text else json.dumps(text)


def _uncaught(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    if error is None or issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)  # type: ignore[arg-type]
        return
    log.critical("uncaught exception", exc_info=(kind, error, trace))
