"""Token ids to text one at a time, and stop strings in the text that comes out.

What can be said of a token before the next one is known depends on how the tokenizer spells bytes:

- byte-level vocabularies (GPT-2, Qwen, Llama 3): tokens are bytes, a UTF-8 decoder holds back at most
  the three bytes of an unfinished code point;
- byte fallback (Llama 2, Gemma): a run of ``<0xNN>`` tokens is text if the whole run is UTF-8 and
  U+FFFD for each of its bytes if not, so a run is held until a token ends it;
- all others (WordPiece, Metaspace): each token is whole characters.
"""

from __future__ import annotations

import codecs
import json
import re
from functools import cache
from typing import Any

#: A longer run of byte tokens is given out as far as it is UTF-8, so that a stream of, say, rare script
#: does not stall. Only if such a run turns out broken later does the text differ from a whole decode.
MAX_HELD_BYTES = 32
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class IncrementalDetokenizer:
    """Text of a growing list of ids. All pushes and the flush joined equal one decode of all the ids.

    No returned text ends inside a code point. The cost of a push does not grow with the stream.
    """

    def __init__(self, backend: Any, skipped: frozenset[int] = frozenset()) -> None:
        """``backend``: a ``tokenizers.Tokenizer``. ``skipped``: ids that add no text."""
        self._backend = backend
        self._skipped = skipped
        kinds = _decoder_kinds(backend)
        only_bytes = set(kinds) - {"Fuse"} == {"ByteLevel"}  # joining what is joined already changes nothing
        self._rule: _Bytes | _Window = _Bytes() if only_bytes else _Window(backend, "ByteFallback" in kinds)

    def push(self, token_id: int) -> str:
        """The text that ``token_id`` makes certain: often its own, none while a code point is unfinished."""
        token = None if token_id in self._skipped else self._backend.id_to_token(token_id)
        # A whole decode leaves ids without a token out as well.
        return "" if token is None else self._rule.push(token_id, token)

    def flush(self) -> str:
        """What was held back, after the last push. The detokenizer is then spent."""
        return self._rule.flush()


class _Bytes:
    """Tokens that spell bytes, one character a byte."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int, token: str) -> str:
        table = byte_level_alphabet()
        try:
            raw = bytes([table[character] for character in token])
        except KeyError:
            # An added token with characters outside the byte alphabet stands for itself.
            raw = token.encode()
        return self._utf8.decode(raw)

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _Window:
    """Decodes the held tokens behind one token of context, for decoders treat a text's first token apart."""

    def __init__(self, backend: Any, byte_fallback: bool) -> None:
        self._backend = backend
        self._byte_fallback = byte_fallback
        self._context: list[int] = []
        self._context_text = ""
        self._held: list[int] = []
        self._held_bytes = bytearray()

    def push(self, token_id: int, token: str) -> str:
        self._held.append(token_id)
        byte = _BYTE_TOKEN.fullmatch(token) if self._byte_fallback else None
        if byte is None:
            return self._release(len(self._held))
        self._held_bytes.append(int(byte[1], 16))
        if len(self._held) < MAX_HELD_BYTES:
            return ""
        return self._release(len(self._held) - _unfinished(self._held_bytes))

    def flush(self) -> str:
        return self._release(len(self._held)) if self._held else ""

    def _release(self, count: int) -> str:
        released, self._held = self._held[:count], self._held[count:]
        del self._held_bytes[:count]
        text = self._decode(self._context + released)
        if text.startswith(self._context_text):
            text = text[len(self._context_text) :]
        else:
            # The context was the valid start of an overlong byte run that broke later: it is out already.
            text = self._decode(released)
        self._context = released
        self._context_text = self._decode(released)
        return text

    def _decode(self, ids: list[int]) -> str:
        return str(self._backend.decode(ids, skip_special_tokens=False))


class StopMatcher:
    """Finds the first stop string in text that arrives in pieces, however it is cut.

    First means completed first; of two completed by the same character, the longer one. ``include``:
    whether the stop string itself belongs to the text. Raises ``ValueError`` on an empty stop string.
    """

    def __init__(self, stops: list[str], include: bool) -> None:
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self._stops = stops
        self._include = include
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """(text that is certain to stand before any stop string, the stop string now found or None).

        After a match nothing more comes out.
        """
        if self._matched is not None:
            return "", self._matched
        text = self._held + text
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            end, start, self._matched = min(found)
            self._held = ""
            return text[: end if self._include else start], self._matched
        safe = min((_possible_start(text, stop) for stop in self._stops), default=len(text))
        self._held = text[safe:]
        return text[:safe], None

    def flush(self) -> str:
        """What was held back because it might have begun a stop string; empty after a match."""
        held, self._held = self._held, ""
        return held


def _possible_start(text: str, stop: str) -> int:
    """Where in ``text`` an unfinished ``stop`` begins; its length if nowhere."""
    start = max(0, len(text) - len(stop) + 1)
    while (start := text.find(stop[0], start)) >= 0:
        if stop.startswith(text[start:]):
            return start
        start += 1
    return len(text)


def _unfinished(raw: bytes | bytearray) -> int:
    """How many bytes at the end of ``raw`` begin a code point without ending it: 0 to 3."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    decoder.decode(bytes(raw))
    return len(decoder.getstate()[0])


def _decoder_kinds(backend: Any) -> list[str]:
    return [step["type"] for step in decoder_steps(backend)]


def decoder_steps(backend: Any) -> list[dict[str, Any]]:
    """The settings of each step of the tokenizer's decoder, sequences flattened; none without a decoder."""

    def flat(decoder: dict[str, Any]) -> list[dict[str, Any]]:
        if decoder["type"] == "Sequence":
            return [step for part in decoder["decoders"] for step in flat(part)]
        return [decoder]

    return [] if backend.decoder is None else flat(json.loads(backend.decoder.__getstate__()))


@cache
def byte_level_alphabet() -> dict[str, int]:
    """The byte-level alphabet: printable Latin-1 stands for itself, other bytes for U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
