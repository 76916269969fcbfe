"""A model's tokens as the bytes that they add to a text, which is how llguidance sees a vocabulary.

The bytes are those that detokenising gives out, token by token. Where a tokenizer spells the first token of a text
differently from the same token behind another (a dropped space, a dropped or missing `##`), the token has a twin: an id
behind the vocabulary that stands for it at the beginning.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any
from weakref import WeakKeyDictionary, ref

import numpy as np
from llguidance import LLTokenizer

from pyruntime.constraints.grammar import shorten
from pyruntime.constraints.spelling import Spelling, spelling_of, unusable
from pyruntime.errors import CapabilityMissing
from pyruntime.tokenization import Tokenizer


class Vocabulary:
    """What constraints need of a model: ``vocab_size`` logits, ``eos_ids`` that end a text and are never part of one.

    ``first_ids`` and ``twin_ids``: int64 [T], a token and the id that stands for it at the beginning of a text.
    Making one takes about a second of processor time for 262,144 tokens, half of it with the interpreter lock held, so
    it belongs where a model is loaded. Raises ``CapabilityMissing`` with the reason for a model that cannot be
    constrained.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self.vocab_size = vocab_size
        self.eos_ids = frozenset(each for each in eos_ids if each < vocab_size)
        if not self.eos_ids:
            raise CapabilityMissing("constraints need a model with an end-of-sequence token; this one has none")
        spelling = spelling_of(tokenizer)
        self.first_ids, self.twin_ids = np.zeros(0, np.int64), np.zeros(0, np.int64)
        words, special = self._words(spelling, tokenizer)
        self.special_ids, self.special_names = frozenset(special), frozenset(special.values())
        speller = _Speller(tokenizer, words, self.special_ids)
        # Forced text is spelled the tokenizer's way, which needs one spelling for all places and a token for each byte.
        self.forces_tokens = not len(self.twin_ids) and speller.has_all_bytes
        source = _Source(words, sorted(special), min(self.eos_ids), speller if self.forces_tokens else None)
        try:
            self.tokens = LLTokenizer(source, eos_token=sorted(self.eos_ids))  # type: ignore[arg-type]
        except ValueError as error:
            raise unusable(shorten(str(error))) from error
        finally:
            source.tokens = []
        self.num_ids = len(words)

    def _words(self, spelling: Spelling, tokenizer: Tokenizer) -> tuple[list[bytes], dict[int, str]]:
        """Each id's bytes, twins last, and the names of tokens that are no text; ids of neither are empty.

        What is empty is never allowed.
        """
        # Ids that only one of tokenizer and model has are in neither's masks: they spell nothing, or are cut off.
        words = list(spelling.later)
        words += [b""] * (self.vocab_size - len(words))
        not_text = sorted(tokenizer.special_token_ids | self.eos_ids)
        special = dict(zip(not_text, tokenizer.pieces(not_text), strict=True))
        for token_id, name in special.items():
            special[token_id] = name or f"<[{token_id}]>"
            words[token_id] = special[token_id].encode()
        differing = [i for i, word in spelling.first.items() if i < self.vocab_size and i not in special]
        self.first_ids = np.array(differing, np.int64)
        # At a whole word of the mask, so that the masks of both are read apart.
        start = (len(words) + 31) // 32 * 32
        words += [b""] * (start - len(words)) + [spelling.first[i] for i in differing]
        self.twin_ids = np.arange(start, start + len(differing), dtype=np.int64)
        return words, special


class _Source:
    """A vocabulary in the form that the library reads."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: list[bytes], special: list[int], eos_id: int, speller: _Speller | None) -> None:
        self.tokens = tokens
        self.special_token_ids = special
        self.eos_token_id = eos_id
        self._speller = speller

    def __call__(self, text: str) -> list[int]:
        if self._speller is None:
            raise RuntimeError("nothing is forced with this vocabulary")
        return self._speller.ids(text)


class _Speller:
    """The tokens that a text is made of when a constraint leaves no choice."""

    def __init__(self, tokenizer: Tokenizer, words: list[bytes], special_ids: frozenset[int]) -> None:
        self._tokenizer = ref(tokenizer)  # which the vocabulary goes with
        self._words = words
        self._special_ids = special_ids
        one_byte = {word[0]: i for i, word in enumerate(words) if len(word) == 1 and i not in special_ids}
        self._byte_ids = one_byte

    @property
    def has_all_bytes(self) -> bool:
        return len(self._byte_ids) == 256

    def ids(self, text: str) -> list[int]:
        """As the tokenizer has it, if that spells the text; byte by byte where it reads a special token in it."""
        tokenizer, raw = self._tokenizer(), text.encode()
        ids = [] if tokenizer is None else tokenizer.encode(text, special_tokens=False)
        if self._special_ids.isdisjoint(ids) and b"".join(self._words[i] for i in ids) == raw:
            return ids
        return [self._byte_ids[byte] for byte in raw]


_known: WeakKeyDictionary[Tokenizer, dict[Any, Vocabulary | CapabilityMissing]] = WeakKeyDictionary()
_lock = threading.Lock()
_building = threading.Lock()  # held for seconds, so never by an event loop


def known_vocabulary(tokenizer: Tokenizer, vocab_size: int, eos_ids: frozenset[int]) -> Vocabulary | None:
    """What ``vocabulary_of`` has made of it, None when it has not been asked."""
    with _lock:
        found = _known.get(tokenizer, {}).get((vocab_size, eos_ids))
    if isinstance(found, CapabilityMissing):
        raise CapabilityMissing(found.message)
    return found


def vocabulary_of(tokenizer: Tokenizer, vocab_size: int, eos_ids: frozenset[int]) -> Vocabulary:
    """The one vocabulary of a model, made at the first call. It goes with its tokenizer."""
    with _building:
        found = known_vocabulary(tokenizer, vocab_size, eos_ids)
        if found is not None:
            return found
        made: Vocabulary | CapabilityMissing
        try:
            made = Vocabulary(tokenizer, vocab_size, eos_ids)
        except CapabilityMissing as error:
            made = CapabilityMissing(error.message)
        with _lock:
            _known.setdefault(tokenizer, {})[vocab_size, eos_ids] = made
    if isinstance(made, CapabilityMissing):
        raise CapabilityMissing(made.message)
    return made


def prepare_vocabulary(tokenizer: Tokenizer, vocab_size: int, eos_ids: frozenset[int]) -> None:
    """Make it where a model is loaded: no stream should wait for the interpreter lock meanwhile."""
    with contextlib.suppress(CapabilityMissing):  # which requests with a constraint are told
        vocabulary_of(tokenizer, vocab_size, eos_ids)
