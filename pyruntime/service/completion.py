"""Token events to text: what Generate and GenerateStream share, so that both say the same."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pyruntime.registry import ServedModel
from pyruntime.types import FinishReason, PromptLogprobs, TokenEvent

if TYPE_CHECKING:
    from pyruntime.jobs.generate import TokenStream


@dataclass(frozen=True)
class TextRules:
    """When text ends and what belongs to it. ``token_ids``: the client's own stop tokens."""

    strings: tuple[str, ...]
    token_ids: frozenset[int]
    min_new_tokens: int
    include_stop: bool


@dataclass(frozen=True)
class TokenLogprob:
    """A token, its text and log-probability, and the likeliest tokens in its place as (id, text, logprob).

    ``selected``: log-probabilities of the tokens that the request lists, in its order.
    """

    token_id: int
    text: str
    logprob: float
    top: list[tuple[int, str, float]]
    selected: tuple[float, ...] = ()


@dataclass
class Piece:
    """What one wake-up adds to one continuation. ``prompt``: with the first one of index 0, when asked for."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    matched_stop: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt: PromptLogprobs | None = None


class Continuation:
    """One continuation: its detokeniser, its stop strings, its end."""

    def __init__(self, index: int, model: ServedModel, rules: TextRules) -> None:
        from pyruntime.tokenization import StopMatcher

        self.index = index
        self.num_tokens = 0
        self.finished = False
        self._tokenizer = model.tokenizer
        self._detokenizer = model.tokenizer.detokenizer()
        self._matcher = StopMatcher(list(rules.strings), rules.include_stop)
        self._rules = rules

    def take(self, piece: Piece, event: TokenEvent) -> None:
        """Add an event to ``piece``. A stop string may set ``finished`` before the engine's own end."""
        piece.prompt = piece.prompt or event.prompt
        ends_by_token = event.finish is FinishReason.STOP and event.token_id is not None
        if event.token_id is not None:
            self.num_tokens += 1
            piece.token_ids.append(event.token_id)
            if event.logprob is not None:
                piece.logprobs.append(self._logprob(event.token_id, event.logprob, event))
            if not ends_by_token:
                self._add(piece, self._detokenizer.push(event.token_id))
        if event.finish is not None and not self.finished:
            self._end(piece, event)

    def _logprob(self, token_id: int, logprob: float, event: TokenEvent) -> TokenLogprob:
        alternatives = [(likely, self._text_of(likely), value) for likely, value in event.top]
        return TokenLogprob(token_id, self._text_of(token_id), logprob, alternatives, event.selected)

    def _text_of(self, token_id: int) -> str:
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    def _add(self, piece: Piece, text: str) -> None:
        """Text through the stop strings. Before ``min_new_tokens`` nothing is looked for."""
        if self.num_tokens <= self._rules.min_new_tokens:
            piece.text += text
            return
        safe, matched = self._matcher.push(text)
        piece.text += safe
        if matched is not None:
            self.finished = True
            piece.finish = FinishReason.STOP
            piece.matched_stop = matched

    def _end(self, piece: Piece, event: TokenEvent) -> None:
        self._add(piece, self._detokenizer.flush())
        if self.finished:  # what the detokeniser had held back completed a stop string
            return
        piece.text += self._matcher.flush()
        self.finished = True
        piece.finish = event.finish
        if event.finish is FinishReason.STOP and event.token_id in self._rules.token_ids:
            piece.matched_stop = self._text_of(event.token_id)
            if self._rules.include_stop:
                piece.text += piece.matched_stop


class Continuations:
    """All continuations of a request, as its stream's events make them grow.

    One that a stop string ends is cancelled in the engine; what the engine still sends of it is dropped.
    """

    def __init__(self, stream: TokenStream, model: ServedModel, number: int, rules: TextRules) -> None:
        self.progress = Progress()
        self._stream = stream
        self._all = [Continuation(index, model, rules) for index in range(number)]
        self._num_open = number

    def add(self, events: list[TokenEvent]) -> list[Piece]:
        """One piece for each continuation that moved, by index."""
        moved: dict[int, Piece] = {}
        for event in events:
            continuation = self._all[event.index]
            if continuation.finished:
                continue
            piece = moved.get(event.index)
            if piece is None:
                piece = moved[event.index] = Piece(event.index)
            continuation.take(piece, event)
            self.progress.note(event)
            if continuation.finished:
                self._num_open -= 1
                if event.finish is None:
                    self._stream.cancel(event.index)
        self.progress.done = not self._num_open
        return [moved[index] for index in sorted(moved)]


async def pieces(
    stream: TokenStream, model: ServedModel, num_continuations: int, rules: TextRules
) -> AsyncIterator[tuple[list[Piece], Progress]]:
    """For each wake-up of the stream, what it adds to the ``Continuations``; ends when all of them have ended."""
    continuations = Continuations(stream, model, num_continuations, rules)
    async for events in stream:
        yield continuations.add(events), continuations.progress
        if continuations.progress.done:
            return


@dataclass
class Progress:
    """What has been counted so far. ``cached_tokens``: of the prompt, as the first continuation found it."""

    num_tokens: int = 0
    cached_tokens: int = 0
    done: bool = False

    def note(self, event: TokenEvent) -> None:
        self.num_tokens += event.token_id is not None
        if event.index == 0:
            self.cached_tokens = event.cached_tokens
