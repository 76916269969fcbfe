"""How a stream is cut into messages: its tokens, and its prompt's log-probabilities, which a unary answer has too."""

from __future__ import annotations

from collections.abc import Iterator

from pyruntime.errors import InvalidField
from pyruntime.registry import ServedModel
from pyruntime.service.completion import Piece
from pyruntime.types import PromptLogprobs
from pyruntime.v1 import generate_pb2

# Of a message of prompt log-probabilities: with names of ordinary length a quarter of a megabyte.
MOST_ENTRIES = 8192
# The least that a token with its log-probability takes: tags, an id of a byte, four bytes of a number.
LEAST_ENTRY_BYTES = 9
# More than all but the oddest token takes.
ENTRY_BYTES = 128


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
