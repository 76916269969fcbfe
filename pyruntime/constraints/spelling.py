"""The bytes that each token of a tokenizer adds to a text, at its beginning and behind other tokens."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field
from typing import Any

from pyruntime.detokenization import byte_level_alphabet
from pyruntime.errors import CapabilityMissing
from pyruntime.tokenization import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PLAIN_BYTES = 0x80  # bytes from here on are text only with others

# Decoders whose tokens are spelled one by one, whatever stands before them but nothing. `Strip` is one of them when it
# takes from the beginning only, `Replace` when it comes before tokens are joined.
_ONE_BY_ONE = {"ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Replace", "Strip", "WordPiece"}

# Steps that treat the beginning of a text like the rest of it.
_SAME_EVERYWHERE = {"ByteFallback", "Fuse", "Replace"}

# Tokens that are decoded in one call, so that others get the interpreter lock between two.
_SLICE = 4096
_NUM_TRIALS, _TRIAL_TOKENS = 64, 6


@dataclass
class Spelling:
    """``later``: bytes behind another token, by id; empty for a token that adds none. ``first``: where they differ, the
    bytes at the beginning of a text, if any."""

    later: list[bytes]
    first: dict[int, bytes] = field(default_factory=dict)


def spelling_of(tokenizer: Tokenizer) -> Spelling:
    """Raises ``CapabilityMissing`` for a tokenizer whose texts are not the joined bytes of their tokens."""
    kinds = _decoders(tokenizer)
    if {kind["type"] for kind in kinds} - {"Fuse"} == {"ByteLevel"}:
        spelling = _byte_level(tokenizer)
    else:
        spelling = _by_decoding(tokenizer, [kind["type"] for kind in kinds])
    _try_out(tokenizer, spelling)
    return spelling


def unusable(problem: str) -> CapabilityMissing:
    return CapabilityMissing(f"constraints do not work with this tokenizer: {problem}")


def _decoders(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The steps of the tokenizer's decoder, if each of them is known to spell tokens one by one."""
    found = tokenizer.decoder_steps()
    joined = False
    for step in found:
        kind = step["type"]
        if kind not in _ONE_BY_ONE:
            raise unusable(f"its decoder has the step {kind}")
        if (kind == "Replace" and joined) or (kind == "Strip" and step.get("stop", 0)):
            raise unusable(f"its decoder's step {kind} reads across tokens")
        joined = joined or kind == "Fuse"
    return found


def _byte_level(tokenizer: Tokenizer) -> Spelling:
    table = byte_level_alphabet()
    later = []
    for piece in tokenizer.pieces(range(tokenizer.vocab_size)):
        try:
            later.append(bytes([table[character] for character in piece]))
        except KeyError:  # an added token with characters outside the byte alphabet stands for itself
            later.append(piece.encode())
    return Spelling(later)


def _by_decoding(tokenizer: Tokenizer, kinds: list[str]) -> Spelling:
    differs = not kinds or not set(kinds) <= _SAME_EVERYWHERE
    before = [_anchor(tokenizer)] if differs else []
    (text_before,) = tokenizer.decode_batch([before])
    spelling = Spelling([])
    for start in range(0, tokenizer.vocab_size, _SLICE):
        ids = range(start, min(start + _SLICE, tokenizer.vocab_size))
        pieces = tokenizer.pieces(ids)
        texts = tokenizer.decode_batch([[*before, i] for i in ids])
        firsts = tokenizer.decode_batch([[i] for i in ids]) if differs else texts
        for token_id, piece, text, first in zip(ids, pieces, texts, firsts, strict=True):
            byte = _BYTE_TOKEN.fullmatch(piece) if "ByteFallback" in kinds else None
            if byte is not None and int(byte[1], 16) >= _PLAIN_BYTES:
                spelling.later.append(bytes([int(byte[1], 16)]))
                continue
            known = bool(piece) and text.startswith(text_before)
            spelling.later.append(text[len(text_before) :].encode() if known else b"")
            if differs and first.encode() != spelling.later[-1]:
                spelling.first[token_id] = first.encode() if piece else b""
    return spelling


def _anchor(tokenizer: Tokenizer) -> int:
    """A token to stand before others: letters and figures, which no decoder takes away."""
    for start in range(0, tokenizer.vocab_size, _SLICE):
        ids = range(start, min(start + _SLICE, tokenizer.vocab_size))
        for token_id, piece in zip(ids, tokenizer.pieces(ids), strict=True):
            if piece.isascii() and piece.isalnum() and token_id not in tokenizer.special_token_ids:
                return token_id
    raise unusable("it has no token of letters alone")


def _try_out(tokenizer: Tokenizer, spelling: Spelling) -> None:
    """The bytes joined must be what detokenising makes of a few random lists of tokens."""
    rng = random.Random(0)
    able = [i for i, word in enumerate(spelling.later) if _is_text(word) and _is_text(spelling.first.get(i, word))]
    able = [i for i in able if i not in tokenizer.special_token_ids]
    lists = [rng.choices(able, k=_TRIAL_TOKENS) for _ in range(_NUM_TRIALS)] if able else []
    for ids, text in zip(lists, tokenizer.decode_batch(lists), strict=True):
        words = [spelling.first.get(ids[0], spelling.later[ids[0]]), *(spelling.later[i] for i in ids[1:])]
        if b"".join(words).decode() != text:
            raise unusable("its tokens are not spelled one by one")


def _is_text(word: bytes) -> bool:
    try:
        return bool(word.decode())
    except UnicodeDecodeError:
        return False
