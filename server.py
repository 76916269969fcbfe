"""Serves models over gRPC. ``python server.py --help`` lists every option with its default."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Coroutine
from typing import Any, NoReturn

# OpenMP reads it when the imports below load torch. By default its threads spin for about a millisecond whenever they
# have nothing to do, on the cores that the event loop and other processes wait for (docs/performance.md).
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

from pyruntime.config import Settings
from pyruntime.errors import UnsafeTransport
from pyruntime.lifecycle import LOADER_THREAD, Load, ModelManager
from pyruntime.machine import allow_many_connections, compute_threads, limit_tokenizer_threads
from pyruntime.model.demo import GEMMA_NAME, MINILM_NAME, gemma_folder, minilm_folder
from pyruntime.registry import ModelRegistry
from pyruntime.service.examples import grpcurl_calls
from pyruntime.service.server_builder import RuntimeServer, build_server
from pyruntime.telemetry.logs import configure_logging, log_loop_errors, writes_json
from pyruntime.telemetry.site import status_page
from pyruntime.telemetry.tracing import TracingUnavailable, open_tracing

log = logging.getLogger("pyruntime.server")

# Exit statuses. FAILED: an address is taken, or no model could be loaded. argparse too ends with 2 on bad usage.
OK, FAILED, BAD_USAGE, DEVICE_LOST = 0, 1, 2, 3
# The requests that a lost device failed get this long to be told so.
LOST_GRACE_S = 1.0


def say(line: str) -> None:
    """One line for the operator: by itself, or in the log where that is for machines."""
    if writes_json():
        log.info("%s", line)
    else:
        print(line, flush=True)


def load_all(manager: ModelManager, settings: Settings) -> list[Load]:
    """Ask for every model of the settings, the demo's after the others."""
    loads = [manager.load(name, path) for name, path in settings.models.items()]
    if settings.demo:
        finders = {GEMMA_NAME: lambda: str(gemma_folder(say)), MINILM_NAME: lambda: str(minilm_folder())}
        own = settings.models.keys()
        loads += [manager.load(name, "demo", find=find) for name, find in finders.items() if name not in own]
    return loads


def catch_signals() -> asyncio.Event:
    """An event that SIGTERM or SIGINT sets; a second signal ends the process at once."""
    stop = asyncio.Event()

    def on_signal(number: int) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
    return stop


async def first_of(*waits: Coroutine[Any, Any, Any]) -> None:
    """Until one of them has ended; the others are cancelled. Raises what that one raised."""
    tasks = [asyncio.create_task(wait) for wait in waits]
    done, others = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in others:
        task.cancel()
    for task in done:
        task.result()


async def serve(settings: Settings) -> int:
    """Run until a signal or until a device is lost. Returns the exit status."""
    with contextlib.ExitStack() as open_to_the_end:
        return await _serve(settings, open_to_the_end)


async def _serve(settings: Settings, open_to_the_end: contextlib.ExitStack) -> int:
    stop = catch_signals()
    log_loop_errors(asyncio.get_running_loop())
    registry = ModelRegistry()
    manager = ModelManager(registry, settings, say)
    try:
        tracing = open_tracing(settings.otlp_endpoint)
        if tracing is not None:
            open_to_the_end.callback(tracing.close)
        server = build_server(registry, settings, manager, tracing)
    except (TracingUnavailable, UnsafeTransport) as problem:
        print(f"server.py: {problem}", file=sys.stderr)
        return BAD_USAGE
    try:
        page = open_to_the_end.enter_context(status_page(settings, registry, server.calls, lambda: server.is_ready))
        await server.start()
    except RuntimeError as error:
        log.error("%s", error)
        return FAILED
    loads = load_all(manager, settings)
    manager.start()
    await first_of(bring_up(loads, server, registry, page), stop.wait(), manager.device_lost.wait())
    manager.stop()
    if manager.device_lost.is_set():
        # What still runs cannot end well, and stopping the engines may hang.
        await server.drain(LOST_GRACE_S)
        return DEVICE_LOST
    if server.num_running:
        say(f"draining: {server.num_running} running requests have {settings.drain_grace_s:g} s to end")
    await server.drain(settings.drain_grace_s)
    if server.has_stalled:  # its thread cannot be joined; what it hangs in is most likely the device
        return DEVICE_LOST
    await manager.close()
    return OK if stop.is_set() else FAILED


async def bring_up(loads: list[Load], server: RuntimeServer, registry: ModelRegistry, page: str) -> None:
    """Announce what serves once all is loaded; returns only when nothing does and nothing can be loaded later."""
    for load in loads:
        await load.wait()
    if not registry.serving() and server.admin is None:
        log.error("no model could be loaded")
        return
    announce(registry, server, page)
    await asyncio.Event().wait()


def announce(registry: ModelRegistry, server: RuntimeServer, page: str) -> None:
    names = ", ".join(model.info.name for model in registry.serving())
    say(f"SERVING on {server.address}: {names or 'no model yet'}")
    if server.admin is not None:
        say(f"pyruntime.v1.AdminService on {server.admin.address}")
    if page:
        say(f"status page and metrics on http://{page}/")
    calls = grpcurl_calls(registry.serving(), server.address, server.grpcurl_flags)
    if calls and not writes_json():
        say("Try, in another terminal (`pyruntime --help` tells of a client that needs no grpcurl):\n")
        say("\n\n".join(calls) + "\n")


def main() -> int:
    settings = Settings.load(sys.argv[1:], os.environ)
    if not settings.models and not settings.demo and not settings.admin_address:
        print("server.py: nothing to serve: give --model NAME=PATH, --demo, or --admin-address", file=sys.stderr)
        return BAD_USAGE
    configure_logging(settings.log_level, settings.log_format, settings.log_texts)
    for problem in settings.idle():
        log.warning("%s", problem)
    limit_tokenizer_threads(compute_threads(settings.threads))
    allow_many_connections()
    status = asyncio.run(serve(settings))
    if status == DEVICE_LOST or any(thread.name == LOADER_THREAD for thread in threading.enumerate()):
        end_process(status)
    return status


def end_process(status: int) -> NoReturn:
    """End while a model is still being loaded or a device is lost.

    torch aborts the process when the interpreter ends under its feet, and may when it tidies up a device that is lost.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    sys.exit(main())
