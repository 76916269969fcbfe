"""Which models this server has, and in which state: loading, serving, failed or unloading.

Names are declared first, so that a request for a model that is still loading is told to come back.
Thread-safe: a loader thread sets states while event loops resolve names.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pyruntime.errors import AlreadyExists, CapabilityMissing, InvalidField, ModelFailed, NotFound, NotReady
from pyruntime.types import Capability, ModelInfo

if TYPE_CHECKING:
    from pyruntime.engine import Engine
    from pyruntime.rerank_template import RerankTemplate
    from pyruntime.tokenization import Tokenizer

LOADING_RETRY_S = 5.0
DRAINING_RETRY_S = 1.0


def shutting_down() -> NotReady:
    return NotReady("the server is shutting down", DRAINING_RETRY_S)


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Sampling values of the model's own ``generation_config.json``; None where it has none."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    eos_token_ids: frozenset[int] = frozenset()


@dataclass
class ServedModel:
    """A model that is ready, with what is needed to serve it. ``release`` lets go of its weights and cache."""

    info: ModelInfo
    engine: Engine
    tokenizer: Tokenizer
    generation_defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    rerank_template: RerankTemplate | None = None
    release: Callable[[], None] = lambda: None

    def close(self) -> None:
        """End the engine, and with it the requests that are open; then free the memory."""
        self.engine.close()
        self.release()


class ModelState(enum.Enum):
    LOADING = "loading"
    SERVING = "serving"
    FAILED = "failed"
    UNLOADING = "unloading"


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """One model as the registry has it.

    ``source``: the folder, file or hub name that it is loaded from. ``is_late``: it joins a server that serves others
    already, and that does not wait for it. ``model``: set while it serves, and while it unloads if it served before.
    """

    name: str
    source: str = ""
    is_late: bool = False
    state: ModelState = ModelState.LOADING
    model: ServedModel | None = None
    failure: str = ""


class ModelRegistry:
    """Models by name. Listeners are called after each change, on the thread that made it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[str, ModelStatus] = {}
        self._listeners: list[Callable[[], None]] = []
        self._draining = False

    # -- the server's side ------------------------------------------------------------------------

    def declare(self, name: str, source: str = "", *, is_late: bool = False) -> None:
        """A model that will be loaded. Raises ``AlreadyExists`` for the name of another, unless that one has failed."""
        with self._lock:
            there = self._entries.get(name)
            if there is not None and there.state is not ModelState.FAILED:
                raise AlreadyExists(f"model {name!r} is {there.state.value}")
            self._entries[name] = ModelStatus(name, source, is_late)
        self._notify()

    def set_serving(self, name: str, model: ServedModel) -> bool:
        """A declared model is ready. False, and nothing happens, when it is not wanted any more."""
        return self._move(name, {ModelState.LOADING}, state=ModelState.SERVING, model=model)

    def set_failed(self, name: str, reason: str) -> bool:
        """A declared model could not be loaded, or has broken down since; ``reason`` is told to clients.

        False, and nothing happens, when it is not wanted any more.
        """
        among = {ModelState.LOADING, ModelState.SERVING}
        return self._move(name, among, state=ModelState.FAILED, model=None, failure=reason)

    def set_unloading(self, name: str) -> ModelStatus:
        """From now on requests for the model are turned away. Returns what it was; raises ``NotFound``."""
        with self._lock:
            if name not in self._entries:
                raise NotFound("model", name, list(self._entries))
            before = self._entries[name]
            self._entries[name] = replace(before, state=ModelState.UNLOADING)
        self._notify()
        return before

    def remove(self, name: str) -> None:
        """Forget a model; its name is unknown from now on, and free."""
        with self._lock:
            del self._entries[name]
        self._notify()

    def drain(self) -> None:
        """From now on every ``resolve`` raises ``NotReady``."""
        with self._lock:
            self._draining = True
        self._notify()

    def add_listener(self, callback: Callable[[], None]) -> None:
        with self._lock:
            self._listeners.append(callback)

    def remove_listener(self, callback: Callable[[], None]) -> None:
        """Does nothing for a callback that is not there."""
        with self._lock:
            self._listeners = [each for each in self._listeners if each != callback]

    # -- the requests' side -----------------------------------------------------------------------

    def resolve(self, name: str, capability: Capability | None) -> ServedModel:
        """The model for a request; ``capability`` None means that any model will do.

        An empty name means the only model that has (or, still loading, may have) the capability.
        Raises ``NotFound``, ``NotReady``, ``ModelFailed``, ``CapabilityMissing``, or ``InvalidField``
        for an empty name that is ambiguous.
        """
        self.refuse_if_draining()
        with self._lock:
            return self._by_name(name, capability) if name else self._only(capability)

    def serving(self) -> list[ServedModel]:
        """The models that are ready, by name."""
        return [each.model for each in self.statuses() if each.model and each.state is ModelState.SERVING]

    def statuses(self) -> list[ModelStatus]:
        """Every model, by name."""
        with self._lock:
            return [entry for _, entry in sorted(self._entries.items())]

    @property
    def is_starting(self) -> bool:
        """Whether a model of the start is still loading, those that join later apart."""
        return any(each.state is ModelState.LOADING and not each.is_late for each in self.statuses())

    def refuse_if_draining(self) -> None:
        """Raises ``NotReady`` while the server is shutting down."""
        if self._draining:
            raise shutting_down()

    @property
    def is_draining(self) -> bool:
        return self._draining

    def _by_name(self, name: str, capability: Capability | None) -> ServedModel:
        entry = self._entries.get(name)
        if entry is None:
            raise NotFound("model", name, list(self._entries))
        if entry.state is ModelState.FAILED:
            raise ModelFailed(f"model {name!r} is not served: {entry.failure}")
        if entry.state is ModelState.UNLOADING:
            raise NotReady(f"model {name!r} is being unloaded", DRAINING_RETRY_S)
        if entry.model is None:
            raise NotReady(f"model {name!r} is still loading", LOADING_RETRY_S)
        if capability is not None and capability not in entry.model.info.capabilities:
            has = ", ".join(sorted(each.value for each in entry.model.info.capabilities))
            raise CapabilityMissing(f"model {name!r} cannot {capability.value}; it can: {has}")
        return entry.model

    def _only(self, capability: Capability | None) -> ServedModel:
        entries = self._entries.values()
        loading = [entry.name for entry in entries if entry.state is ModelState.LOADING and not entry.is_late]
        served = [entry.model for entry in entries if entry.model and entry.state is ModelState.SERVING]
        able = [model for model in served if capability is None or capability in model.info.capabilities]
        wanted = "serve requests" if capability is None else capability.value
        if len(able) > 1:
            names = ", ".join(sorted(model.info.name for model in able))
            raise InvalidField("model", f"is empty, and several models can {wanted}: {names}")
        if loading:
            # Which models are candidates is known only once all are loaded: an answer now might differ later.
            raise NotReady(f"models are still loading: {', '.join(sorted(loading))}", LOADING_RETRY_S)
        if not able:
            raise CapabilityMissing(f"no served model can {wanted}")
        return able[0]

    def _move(self, name: str, among: set[ModelState], **changes: Any) -> bool:
        with self._lock:
            there = self._entries.get(name)
            if there is None or there.state not in among:
                return False
            self._entries[name] = replace(there, **changes)
        self._notify()
        return True

    def _notify(self) -> None:
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            listener()
