"""Models come and go: those of the start and those that the operator loads later take the same way.

Loads run one after the other on a thread of their own, since each measures the memory that the ones before it left.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from pyruntime.config import Settings
from pyruntime.registry import ModelRegistry, ServedModel

log = logging.getLogger(__name__)

LOADER_THREAD = "loader"
# How often a model that is being unloaded is asked whether its last request has ended.
LOOK_AGAIN_S = 0.02


@dataclass(frozen=True, slots=True)
class Load:
    """One model to be loaded. ``done`` gets its result when the registry has the outcome; cancelled: it never began.

    ``is_late``: it does not divide a share of the memory with those that wait behind it.
    """

    name: str
    find: Callable[[], str]
    settings: Settings
    is_late: bool
    done: Future[None] = field(default_factory=Future)

    async def wait(self) -> None:
        """Until it serves, has failed or was given up; the registry tells which. Cancelling this stops no load."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def tell(_: Future[None]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(ended.set)

        self.done.add_done_callback(tell)
        await ended.wait()


class ModelManager:
    """The only one that loads and unloads. Make it on the server's event loop, whose coroutines alone may call it.

    ``report`` is given a line for the operator now and then, on any thread. ``device_lost`` is set once a device has
    failed in a way that only a new process can mend.
    """

    def __init__(self, registry: ModelRegistry, settings: Settings, report: Callable[[str], None]) -> None:
        self._registry = registry
        self._settings = settings
        self._report = report
        self._loop = asyncio.get_running_loop()
        self._loads: dict[str, Load] = {}
        self._unloads: dict[str, asyncio.Task[int]] = {}
        self._queue: queue.SimpleQueue[Load | None] = queue.SimpleQueue()
        self.device_lost = asyncio.Event()
        # A daemon: loading cannot be interrupted, and must not hold up the end of the process.
        self._thread = threading.Thread(target=self._run, name=LOADER_THREAD, daemon=True)

    def start(self) -> None:
        """Begin with the loads asked for so far; later ones follow as they come."""
        self._thread.start()

    def load(
        self,
        name: str,
        source: str,
        *,
        find: Callable[[], str] | None = None,
        settings: Settings | None = None,
        is_late: bool = False,
    ) -> Load:
        """Have a model loaded from ``source``: a folder, a ``.gguf`` file or a hub name.

        ``find``: what makes the folder when ``source`` is only what people call it. ``settings``: other ones than the
        server's. ``is_late``: as in ``ModelStatus``. Raises ``AlreadyExists`` unless a model of this name has failed.
        """
        self._registry.declare(name, source, is_late=is_late)
        load = Load(name, find or (lambda: source), settings or self._settings, is_late)
        self._loads[name] = load
        self._queue.put(load)
        return load

    async def unload(self, name: str, grace_s: float) -> int:
        """Take a model out of service and free its memory. Returns how many requests outlasted the grace.

        New requests for it are turned away at once, those that run have ``grace_s`` to end and are then ended with
        ``NotReady``. A load that runs cannot be stopped: its result is dropped as soon as it is there. A second call
        waits for the first. Cancelling a call does not undo it. Raises ``NotFound``.
        """
        if name not in self._unloads:
            before = self._registry.set_unloading(name)
            self._unloads[name] = asyncio.create_task(self._unload(name, before.model, grace_s), name=f"unload-{name}")
            del before
        return await asyncio.shield(self._unloads[name])

    def stop(self) -> None:
        """Begin no further load."""
        for load in self._loads.values():
            load.done.cancel()
        self._queue.put(None)

    async def close(self) -> None:
        """End every engine, those of models that are being unloaded included."""
        self.stop()
        for each in self._registry.statuses():
            if each.model is not None:
                await asyncio.to_thread(each.model.close)

    # -- unloading --------------------------------------------------------------------------------

    async def _unload(self, name: str, model: ServedModel | None, grace_s: float) -> int:
        load, num_left = self._loads.pop(name, None), 0
        if model is not None:
            num_left = await self._end_requests(model, grace_s)
            del model
        elif load is not None and not load.done.cancel():
            await load.wait()
        self._registry.remove(name)
        del self._unloads[name]
        gc.unfreeze()  # models are in cycles; the next load keeps the others from the collector again
        await asyncio.to_thread(_release_memory)
        self._report(f"model {name} is unloaded")
        return num_left

    async def _end_requests(self, model: ServedModel, grace_s: float) -> int:
        end = self._loop.time() + grace_s
        # Its requests end on the engine's thread and on the loop, with nobody to tell.
        while (num_left := model.engine.load().num_requests) and self._loop.time() < end:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_AGAIN_S)
        if num_left:
            log.warning("model %s: %d requests outlast %g s and are ended", model.info.name, num_left, grace_s)
        await asyncio.to_thread(model.close)
        return num_left

    # -- the loader thread ------------------------------------------------------------------------

    def _run(self) -> None:
        while (load := self._queue.get()) is not None:
            if load.done.set_running_or_notify_cancel():
                # A thread each: with its end go the OpenMP threads that computed for it (see StepThread).
                thread = threading.Thread(target=self._load, args=(load,), name=f"load-{load.name}", daemon=True)
                try:
                    thread.start()
                    thread.join()
                finally:
                    load.done.set_result(None)

    def _load(self, load: Load) -> None:
        name, num_sharing = load.name, self._num_sharing(load)
        try:
            # Here rather than above: torch and transformers take seconds to import, and health answers meanwhile.
            from pyruntime.serving import load_served_model

            model = load_served_model(name, load.find(), load.settings, self._report, num_sharing)
        except Exception as error:
            # As text: whoever keeps the error keeps its frames, and in them the model.
            reason = str(error) or type(error).__name__
            log.error("model %s is not served: %s", name, reason, exc_info=log.isEnabledFor(logging.DEBUG))
            self._registry.set_failed(name, reason)
        else:
            # Before requests can reach the engine, and with them what could break it.
            model.engine.on_failed = functools.partial(self._break_down, name, model.release)
            model.engine.on_device_lost = self._lose_device
            _keep_from_collector()
            if self._registry.set_serving(name, model):
                self._report(f"model {name} is ready")
                return
            model.close()  # it was unloaded while it was loading
            del model
        _release_memory()

    def _num_sharing(self, load: Load) -> int | None:
        """Itself and those of the start behind it that are still wanted: they divide a share of the memory."""
        if load.is_late:
            return None
        loads = list(self._loads.values())
        return 1 + sum(not (each is load or each.is_late or each.done.done()) for each in loads)

    def _break_down(self, name: str, release: Callable[[], None], reason: str) -> None:
        self._registry.set_failed(name, reason)
        release()

    def _lose_device(self, reason: str) -> None:
        log.critical("%s; this process ends", reason)
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends anyway
            self._loop.call_soon_threadsafe(self.device_lost.set)


def _keep_from_collector() -> None:
    """From now on the garbage collector passes over what there is now, until ``gc.unfreeze``.

    Imports, tokenizers and weights are hundreds of thousands of objects that stay: to look at all of them takes a fifth
    of a second, in which no thread runs. What belongs to a request is freed all the same when it ends, unless it is in
    a cycle; that waits until a model is unloaded.
    """
    gc.collect()
    gc.freeze()


def _release_memory() -> None:
    from pyruntime.model.memory import release_memory

    gc.collect()
    release_memory()
