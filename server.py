"""Serves models over gRPC. ``python server.py --help`` lists every option with its default."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import signal
import sys
import threading
from typing import NoReturn

from pyruntime.config import Settings
from pyruntime.model.demo import GEMMA_NAME, MINILM_NAME, demo_models
from pyruntime.registry import ModelRegistry
from pyruntime.service.examples import grpcurl_calls
from pyruntime.service.server_builder import RuntimeServer, build_server

log = logging.getLogger("pyruntime.server")

LOADER_THREAD = "loader"


def say(line: str) -> None:
    """One line for the operator."""
    print(line, flush=True)


class Loader:
    """Loads the models one after the other on a thread of its own, while the server already answers health."""

    def __init__(self, registry: ModelRegistry, settings: Settings) -> None:
        self._registry = registry
        self._settings = settings
        self._demo_names: set[str] = set()
        self._stopped = threading.Event()
        self.done = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        # A daemon: loading cannot be interrupted, and must not hold up the end of the process.
        self._thread = threading.Thread(target=self._run, name=LOADER_THREAD, daemon=True)

    def start(self) -> None:
        """Declare every model, then load them."""
        demo = {GEMMA_NAME, MINILM_NAME} if self._settings.demo else set()
        self._demo_names = demo - self._settings.models.keys()
        for name in [*self._settings.models, *sorted(self._demo_names)]:
            self._registry.declare(name)
        self._thread.start()

    def stop(self) -> None:
        """Start no further load."""
        self._stopped.set()

    def _run(self) -> None:
        try:
            for name, path in (self._settings.models | self._demo_paths()).items():
                if not self._stopped.is_set():
                    self._load(name, path)
        finally:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits for the models any more
                self._loop.call_soon_threadsafe(self.done.set)

    def _demo_paths(self) -> dict[str, str]:
        if not self._demo_names:
            return {}
        try:
            return {name: path for name, path in demo_models(say).items() if name in self._demo_names}
        except Exception as error:
            log.exception("the demo models could not be prepared")
            for name in self._demo_names:
                self._registry.set_failed(name, f"it could not be prepared: {error}")
            return {}

    def _load(self, name: str, path: str) -> None:
        # Here rather than above: torch and transformers take seconds to import, and health answers meanwhile.
        from pyruntime.serving import load_served_model

        try:
            model = load_served_model(name, path, self._settings, say)
        except Exception as error:
            log.error("model %s is not served: %s", name, error, exc_info=log.isEnabledFor(logging.DEBUG))
            self._registry.set_failed(name, str(error))
        else:
            # Before requests can reach the engine, and with them what could break it.
            model.engine.on_failed = functools.partial(self._registry.set_failed, name)
            self._registry.set_serving(name, model)
            say(f"model {name} is ready")


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


async def first_of(*events: asyncio.Event) -> None:
    tasks = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


async def serve(settings: Settings) -> int:
    """Run until a signal. Exit status: 0, or 1 when the port is taken or no model could be loaded."""
    stop = catch_signals()
    registry = ModelRegistry()
    server = build_server(registry, settings)
    try:
        port = await server.start()
    except RuntimeError as error:
        log.error("cannot listen on %s:%d: %s", settings.host, settings.port, error)
        return 1
    loader = Loader(registry, settings)
    loader.start()
    await first_of(loader.done, stop)
    loader.stop()
    status = 0
    if not stop.is_set():
        if registry.serving():
            announce(registry, settings, port)
            await stop.wait()
        else:
            log.error("no model could be loaded")
            status = 1
    await shut_down(server, registry, settings)
    return status


def announce(registry: ModelRegistry, settings: Settings, port: int) -> None:
    address = f"{settings.host}:{port}"
    say(f"SERVING on {address}: {', '.join(model.info.name for model in registry.serving())}")
    calls = grpcurl_calls(registry.serving(), address)
    if calls:
        say("Try, in another terminal:\n\n" + "\n\n".join(calls) + "\n")


async def shut_down(server: RuntimeServer, registry: ModelRegistry, settings: Settings) -> None:
    if server.num_running:
        say(f"draining: {server.num_running} running requests have {settings.drain_grace_s:g} s to end")
    models = registry.serving()
    await server.drain(settings.drain_grace_s)
    for model in models:
        await asyncio.to_thread(model.engine.close)


def main() -> int:
    settings = Settings.load(sys.argv[1:], os.environ)
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    if not settings.models and not settings.demo:
        print("server.py: nothing to serve: give --model NAME=PATH, or --demo", file=sys.stderr)
        return 2
    status = asyncio.run(serve(settings))
    if any(thread.name == LOADER_THREAD for thread in threading.enumerate()):
        end_process(status)
    return status


def end_process(status: int) -> NoReturn:
    """End while a model is still being loaded: torch aborts the process when the interpreter ends under its feet."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    sys.exit(main())
