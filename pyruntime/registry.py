"""Which models this server has, and in which state: loading, serving or failed.

Names are declared first, so that a request for a model that is still loading is told to come back.
Thread-safe: a loader thread sets states while event loops resolve names.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pyruntime.errors import CapabilityMissing, InvalidField, ModelFailed, NotFound, NotReady
from pyruntime.types import Capability, ModelInfo

if TYPE_CHECKING:
    from pyruntime.engine import Engine
    from pyruntime.tokenization import Tokenizer

LOADING_RETRY_S = 5.0
DRAINING_RETRY_S = 1.0


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
    """A model that is ready, with what is needed to serve it."""

    info: ModelInfo
    engine: Engine
    tokenizer: Tokenizer
    generation_defaults: GenerationDefaults = field(default_factory=GenerationDefaults)


class ModelState(enum.Enum):
    LOADING = "loading"
    SERVING = "serving"
    FAILED = "failed"


@dataclass
class _Entry:
    state: ModelState = ModelState.LOADING
    model: ServedModel | None = None
    failure: str = ""


class ModelRegistry:
    """Models by name. Listeners are called after each change, on the thread that made it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        self._listeners: list[Callable[[], None]] = []
        self._draining = False

    # -- the server's side ------------------------------------------------------------------------

    def declare(self, name: str) -> None:
        """A model that will be loaded. Raises ValueError for a name declared before."""
        with self._lock:
            if name in self._entries:
                raise ValueError(f"model {name!r} is declared twice")
            self._entries[name] = _Entry()
        self._notify()

    def set_serving(self, name: str, model: ServedModel) -> None:
        """A declared model is ready."""
        with self._lock:
            self._entries[name] = _Entry(ModelState.SERVING, model)
        self._notify()

    def set_failed(self, name: str, reason: str) -> None:
        """A declared model could not be loaded, or has broken down since; ``reason`` is told to clients."""
        with self._lock:
            self._entries[name] = _Entry(ModelState.FAILED, failure=reason)
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
        with self._lock:
            if self._draining:
                raise NotReady("the server is shutting down", DRAINING_RETRY_S)
            return self._by_name(name, capability) if name else self._only(capability)

    def serving(self) -> list[ServedModel]:
        """The models that are ready, by name."""
        with self._lock:
            entries = sorted(self._entries.items())
        return [entry.model for _, entry in entries if entry.model is not None]

    def states(self) -> dict[str, ModelState]:
        with self._lock:
            return {name: entry.state for name, entry in self._entries.items()}

    @property
    def is_draining(self) -> bool:
        return self._draining

    def _by_name(self, name: str, capability: Capability | None) -> ServedModel:
        entry = self._entries.get(name)
        if entry is None:
            raise NotFound("model", name, list(self._entries))
        if entry.state is ModelState.FAILED:
            raise ModelFailed(f"model {name!r} is not served: {entry.failure}")
        if entry.model is None:
            raise NotReady(f"model {name!r} is still loading", LOADING_RETRY_S)
        if capability is not None and capability not in entry.model.info.capabilities:
            has = ", ".join(sorted(each.value for each in entry.model.info.capabilities))
            raise CapabilityMissing(f"model {name!r} cannot {capability.value}; it can: {has}")
        return entry.model

    def _only(self, capability: Capability | None) -> ServedModel:
        loading = [name for name, entry in self._entries.items() if entry.state is ModelState.LOADING]
        served = [entry.model for entry in self._entries.values() if entry.model is not None]
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

    def _notify(self) -> None:
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            listener()
