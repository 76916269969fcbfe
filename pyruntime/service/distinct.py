"""Inputs that come twice in a request are computed once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from pyruntime.errors import InvalidField, PyruntimeError
from pyruntime.service.room import good_ones

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Distinct(Generic[T]):
    """``inputs``: each different good one once, in order. ``places``: which of them an input is, or its error."""

    inputs: list[T]
    places: list[int | InvalidField]

    def spread(self, answers: Sequence[R]) -> list[R | PyruntimeError]:
        """One outcome an input of the request, from one answer for each of ``inputs``: the answer, or its ``error``.

        Nothing was computed for an input that came before: all its tokens count as cached.
        """
        seen: set[int] = set()
        outcomes: list[R | PyruntimeError] = []
        for place in self.places:
            if isinstance(place, InvalidField):
                outcomes.append(place)
                continue
            answer: Any = answers[place]
            if not isinstance(answer, PyruntimeError):
                answer = answer.error or answer
            if place in seen and not isinstance(answer, PyruntimeError):
                answer = replace(answer, cached_tokens=answer.prompt_tokens)
            outcomes.append(answer)
            seen.add(place)
        return outcomes


def distinct(inputs: Sequence[T | InvalidField], key: Callable[[T], Hashable]) -> Distinct[T]:
    """Raises ``InvalidFields`` when there is no good input at all."""
    good_ones(list(inputs))
    found: dict[Hashable, int] = {}
    kept: list[T] = []
    places: list[int | InvalidField] = []
    for each in inputs:
        if isinstance(each, InvalidField):
            places.append(each)
            continue
        place = found.setdefault(key(each), len(kept))
        if place == len(kept):
            kept.append(each)
        places.append(place)
    return Distinct(kept, places)
