"""Asks every engine now and then whether its step thread still answers."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Callable

from pyruntime.registry import ModelRegistry, ServedModel

log = logging.getLogger(__name__)

# Engines are asked so often, in seconds, or four times within the limit if that is more often.
ASK_AGAIN_S = 1.0


class _Question:
    """One question to one engine. ``is_answered`` is set on the engine's thread."""

    def __init__(self, model: ServedModel, now: float) -> None:
        self._model = weakref.ref(model)  # which may be unloaded meanwhile, and its memory is wanted then
        self.asked_at = now
        self.is_answered = False
        model.engine.probe(self._answer)

    def _answer(self) -> None:
        self.is_answered = True

    def is_about(self, model: ServedModel) -> bool:
        return self._model() is model


class SelfProbe:
    """``stalled``: the models whose engine has not come round to a question for ``limit_s``; 0: none ever are.

    An engine answers between two steps: one that hangs is seen, in whatever its thread does; a long step is not, unless
    it takes longer than the limit. ``on_change`` is called when ``stalled`` has changed.
    """

    def __init__(self, registry: ModelRegistry, limit_s: float, on_change: Callable[[], None]) -> None:
        self.stalled: frozenset[str] = frozenset()
        self._registry = registry
        self._limit_s = limit_s
        self._on_change = on_change
        self._questions: dict[str, _Question] = {}

    async def run(self) -> None:
        """For ever; ends when it is cancelled."""
        if not self._limit_s:
            return
        while True:
            self.look(asyncio.get_running_loop().time())
            await asyncio.sleep(min(ASK_AGAIN_S, self._limit_s / 4))

    def look(self, now: float) -> None:
        """Ask those who have answered, and judge those who have not."""
        served = {model.info.name: model for model in self._registry.serving()}
        for gone in self._questions.keys() - served.keys():
            del self._questions[gone]
        stalled = set()
        for name, model in served.items():
            question = self._questions.get(name)
            if question is None or question.is_answered or not question.is_about(model):
                self._questions[name] = _Question(model, now)
            elif now - question.asked_at > self._limit_s:
                stalled.add(name)
        self._tell(frozenset(stalled))

    def _tell(self, stalled: frozenset[str]) -> None:
        for name in sorted(stalled - self.stalled):
            log.error("model %s: its engine has not answered for %g s; health says NOT_SERVING", name, self._limit_s)
        for name in sorted(self.stalled - stalled):
            log.warning("model %s: its engine answers again, or is gone", name)
        if stalled != self.stalled:
            self.stalled = stalled
            self._on_change()
