"""How a stream becomes messages: its tokens, and its prompt's log-probabilities, which a unary answer has too."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from pyruntime.errors import InvalidField
from pyruntime.registry import ServedModel
from pyruntime.service.completion import Continuations, Piece, TokenLogprob
from pyruntime.types import FinishReason, PromptLogprobs, TokenEvent
from pyruntime.v1 import generate_pb2

if TYPE_CHECKING:
    from pyruntime.jobs.generate import TokenStream

# Of a message of prompt log-probabilities: with names of ordinary length a quarter of a megabyte.
MOST_ENTRIES = 8192
# The least that a token with its log-probability takes: tags, an id of a byte, four bytes of a number.
LEAST_ENTRY_BYTES = 9
# More than all but the oddest token takes.
ENTRY_BYTES = 128


FINISH_PB = {
    None: generate_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: generate_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: generate_pb2.FINISH_REASON_LENGTH,
}


class Gatherer:
    """Holds pieces back until they have ``chunk_tokens`` tokens, each continuation by itself; its end lets all go."""

    def __init__(self, chunk_tokens: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._held: dict[int, Piece] = {}

    def add(self, moved: list[Piece]) -> list[Piece]:
        """What is to be sent now, in the order of ``moved``."""
        ready = []
        for piece in moved:
            held = self._held.pop(piece.index, None)
            whole = piece if held is None else _joined(held, piece)
            if whole.finish is not None or len(whole.token_ids) >= self._chunk_tokens:
                ready.append(whole)
            else:
                self._held[piece.index] = whole
        return ready


def _joined(first: Piece, second: Piece) -> Piece:
    return Piece(
        index=first.index,
        text=first.text + second.text,
        token_ids=first.token_ids + second.token_ids,
        finish=second.finish,
        matched_stop=second.matched_stop,
        logprobs=first.logprobs + second.logprobs,
    )


class ChunkFeed:
    """The messages of a stream, as its events come. Rests where those of the prompt's log-probabilities go first.

    ``prompt``: these, once they are there; set it to None when they have been sent. ``end`` completes the last message.
    """

    def __init__(
        self,
        stream: TokenStream,
        continuations: Continuations,
        gatherer: Gatherer,
        end: Callable[[generate_pb2.GenerateChunk], None],
    ) -> None:
        self.prompt: PromptLogprobs | None = None
        self.listen = stream.listen
        self._take_events = stream.take
        self._continuations = continuations
        self._gatherer = gatherer
        self._end = end
        self._ready: deque[generate_pb2.GenerateChunk] = deque()
        self._has_ended = False

    @property
    def is_done(self) -> bool:
        return self._has_ended and not self._ready and self.prompt is None

    @property
    def rests(self) -> bool:
        return self.prompt is not None or self.is_done

    def take(self) -> generate_pb2.GenerateChunk | None:
        while not (self._ready or self._has_ended):
            events = self._take_events()
            if events is None:
                return None
            self._add(events)
        return self._ready.popleft() if self._ready and self.prompt is None else None

    def _add(self, events: list[TokenEvent]) -> None:
        moved = self._continuations.add(events)
        for piece in moved:
            self.prompt = self.prompt or piece.prompt
        self._ready += map(_chunk, self._gatherer.add(moved))
        is_done = self._continuations.progress.done
        if is_done:
            self._end(self._ready[-1])
        self._has_ended = is_done or not events


def check_prompt_logprobs(num_tokens: int, top: int, max_message_bytes: int) -> None:
    """Refuses a unary answer whose entries cannot fit one message, before anything is computed."""
    entries = max(num_tokens - 1, 0) * (1 + top)
    least = entries * LEAST_ENTRY_BYTES
    if least > max_message_bytes:
        problem = f"{entries} log-probabilities make a response of at least {least} bytes; allowed: at most"
        raise InvalidField("logprobs.prompt", f"{problem} {max_message_bytes} (max_message_bytes); use GenerateStream")


def prompt_messages(
    found: PromptLogprobs, model: ServedModel, max_message_bytes: int
) -> list[list[generate_pb2.TokenLogprob]]:
    """An entry for each token of the prompt but the first, in parts that fit a message. To be run by a worker."""
    text = {i: model.tokenizer.decode([i], skip_special_tokens=False) for i in set(found.ids.flatten().tolist())}
    parts: list[list[generate_pb2.TokenLogprob]] = []
    rows = max(1, min(MOST_ENTRIES, max_message_bytes // ENTRY_BYTES) // found.ids.shape[1])
    for start in range(0, len(found.ids), rows):
        part = slice(start, start + rows)
        parts.append([_entry(i, v, text) for i, v in zip(*_lists(found, part), strict=True)])
    return parts


def _lists(found: PromptLogprobs, part: slice) -> Iterator[list[list[float]]]:
    return (values[part].tolist() for values in found)


def _entry(ids: list[int], logprobs: list[float], text: dict[int, str]) -> generate_pb2.TokenLogprob:
    others = zip(ids[1:], logprobs[1:], strict=True)
    alternative = generate_pb2.TokenLogprob.Alternative
    return generate_pb2.TokenLogprob(
        token_id=ids[0],
        text=text[ids[0]],
        logprob=logprobs[0],
        top=[alternative(token_id=i, text=text[i], logprob=value) for i, value in others],
    )


def _chunk(piece: Piece) -> generate_pb2.GenerateChunk:
    return generate_pb2.GenerateChunk(
        index=piece.index,
        text=piece.text,
        token_ids=piece.token_ids,
        logprobs=map(token_logprob, piece.logprobs),
        finish_reason=FINISH_PB[piece.finish],
        matched_stop=piece.matched_stop,
    )


def token_logprob(token: TokenLogprob) -> generate_pb2.TokenLogprob:
    return generate_pb2.TokenLogprob(
        token_id=token.token_id,
        text=token.text,
        logprob=token.logprob,
        selected=token.selected,
        top=[
            generate_pb2.TokenLogprob.Alternative(token_id=token_id, text=text, logprob=logprob)
            for token_id, text, logprob in token.top
        ],
    )
