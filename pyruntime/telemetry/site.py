"""What the metrics port serves: ``/metrics``, the status page and its numbers, liveness and readiness."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from importlib import metadata
from importlib.resources import files

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

from pyruntime.config import Settings
from pyruntime.registry import ModelRegistry
from pyruntime.telemetry.calls import CallStats
from pyruntime.telemetry.collector import RuntimeCollector, make_registry
from pyruntime.telemetry.history import INTERVAL_S, History
from pyruntime.telemetry.http import Answer, HttpServer, Question, text
from pyruntime.telemetry.report import StatusReport
from pyruntime.telemetry.sources import Sources

log = logging.getLogger(__name__)

# An answer is given again for so many times the time that it took to make: asking often costs a tenth of a core.
REUSE_FACTOR = 9
# An event loop that has not answered for so long counts as stuck.
LOOP_PATIENCE_S = 2.0


class LoopProbe:
    """How long the event loop of the calls takes to answer. ``ask`` runs on another loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.lag_s = 0.0

    async def ask(self) -> bool:
        """Whether it answers within ``LOOP_PATIENCE_S``."""
        began, here = time.monotonic(), asyncio.get_running_loop()
        answered = asyncio.Event()

        def answer() -> None:
            if not here.is_closed():
                here.call_soon_threadsafe(answered.set)

        try:
            self._loop.call_soon_threadsafe(answer)
            async with asyncio.timeout(LOOP_PATIENCE_S):  # wait_for of Python 3.11 may lose a cancellation
                await answered.wait()
        except (RuntimeError, TimeoutError):  # it is closed, or stuck
            return False
        finally:
            self.lag_s = time.monotonic() - began
        return True


class Reused:
    """An answer's body, made anew only when the last one has been used long enough for what it cost."""

    def __init__(self, make: Callable[[], bytes]) -> None:
        self._make = make
        self._body = b""
        self._until = 0.0

    def body(self) -> bytes:
        began = time.monotonic()
        if began >= self._until:
            self._body = self._make()
            now = time.monotonic()
            self._until = now + REUSE_FACTOR * (now - began)
        return self._body


class Site:
    """The routes. Make it on the event loop that runs the calls; ``is_ready`` says what overall health does."""

    def __init__(self, models: ModelRegistry, calls: CallStats, is_ready: Callable[[], bool]) -> None:
        self._probe = LoopProbe(asyncio.get_running_loop())
        self._is_ready = is_ready
        self._history = History(models)
        version = metadata.version("pyruntime")
        sources = Sources(models, calls, version, is_ready, loop_lag_s=lambda: self._probe.lag_s)
        self.metrics = make_registry(RuntimeCollector(sources))
        report = StatusReport(sources, self._history)
        self._plain = Reused(lambda: generate_latest(self.metrics))
        self._open_metrics = Reused(lambda: openmetrics.generate_latest(self.metrics))
        self._status = Reused(lambda: json.dumps(report.make(), allow_nan=False, separators=(",", ":")).encode())
        self._page = page()

    async def answer(self, question: Question) -> Answer:
        match question.path:
            case "/":
                return self._page
            case "/status.json":
                return Answer(HTTPStatus.OK, "application/json", self._status.body())
            case "/metrics" if "application/openmetrics-text" in question.accept:
                return Answer(HTTPStatus.OK, openmetrics.CONTENT_TYPE_LATEST, self._open_metrics.body())
            case "/metrics":
                return Answer(HTTPStatus.OK, CONTENT_TYPE_PLAIN_0_0_4, self._plain.body())
            case "/livez":
                return _verdict(await self._probe.ask(), "alive", "the event loop of the calls does not answer")
            case "/readyz":
                # What health last said is no news from a loop that is stuck.
                return _verdict(self._is_ready() and await self._probe.ask(), "ready", "not ready")
        return text(HTTPStatus.NOT_FOUND, "there are /, /metrics, /status.json, /livez and /readyz")

    async def watch(self) -> None:
        """Take the samples of the curves, for ever."""
        while True:
            await self._probe.ask()
            try:
                self._history.sample(time.time())
            except Exception:
                log.exception("a sample for the status page could not be taken")
            await asyncio.sleep(INTERVAL_S)


def _verdict(good: bool, yes: str, no: str) -> Answer:
    return text(HTTPStatus.OK, yes) if good else text(HTTPStatus.SERVICE_UNAVAILABLE, no)


def page() -> Answer:
    """The status page with its style and script inside it, and a policy that lets nothing else run or load."""
    folder = files("pyruntime.telemetry") / "page"
    names = ("page.html", "page.css", "chart.js", "page.js")
    html, style, chart, rest = (folder.joinpath(name).read_text("utf-8") for name in names)
    script = chart + rest
    policy = "; ".join(
        (
            "default-src 'none'",
            f"style-src {_hash_of(style)}",
            f"script-src {_hash_of(script)}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )
    body = html.replace("/*style*/", style).replace("/*script*/", script).encode()
    headers = (("Content-Security-Policy", policy), ("Referrer-Policy", "no-referrer"))
    return Answer(HTTPStatus.OK, "text/html; charset=utf-8", body, headers)


def _hash_of(source: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"


@contextlib.contextmanager
def status_page(
    settings: Settings, models: ModelRegistry, calls: CallStats, is_ready: Callable[[], bool]
) -> Iterator[str]:
    """The metrics port of the settings, open inside the block; its address, or an empty text where they have none.

    To be entered on the event loop that runs the calls. Raises RuntimeError when the address cannot be had.
    """
    if settings.metrics_port is None:
        yield ""
        return
    site = Site(models, calls, is_ready)
    server = HttpServer(settings.metrics_host, settings.metrics_port, site.answer, site.watch)
    server.start()
    try:
        yield server.address
    finally:
        server.stop()
