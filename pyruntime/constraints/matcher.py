"""What may come next in one continuation, as a bitmask over the vocabulary."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
from llguidance import LLMatcher

from pyruntime.constraints.aside import aside
from pyruntime.constraints.grammar import NOT_TO_BE_FOLLOWED, limits, shorten
from pyruntime.constraints.vocabulary import Vocabulary
from pyruntime.errors import InvalidField

# Processor time that following a request's texts may take, all its continuations together: so much at first, and so
# much more with each token. A schema takes 0.1 ms a token, patterns over letters of any script up to 3 ms.
FIRST_S, TOKEN_S = 2.0, 0.002
# What of it may be taken while others wait, in the same way: more goes aside until tokens have made up for it.
AT_ONCE_S, AT_ONCE_TOKEN_S = 0.01, 0.0003


class Foreseen(NamedTuple):
    """A token that may come, and the mask behind it."""

    token_id: int
    mask: Any


class Constraint:
    """A compiled constraint of one request.

    ``grammar``: the library's. ``field``: its proto path, for errors. Raises ``InvalidField`` when no text but the
    empty one can be spelled, and for what is wrong with the grammar together with the model's tokens.
    """

    def __init__(self, grammar: str, field: str, vocabulary: Vocabulary) -> None:
        self.field = field
        self.vocabulary = vocabulary
        form = grammar if vocabulary.forces_tokens else _unforced(grammar)
        self._root = LLMatcher(vocabulary.tokens, form, limits=limits(), log_level=0)
        if problem := self._root.get_error():
            raise InvalidField(field, f"does not compile: {shorten(problem)}")
        self._left_s, self._at_once_s = FIRST_S, AT_ONCE_S
        first = Matcher(self, self._root, frozenset())
        if first.look():
            raise InvalidField(field, "no text conforms to it but the empty one")
        self._first = first.mask

    @property
    def vocab_size(self) -> int:
        return self.vocabulary.vocab_size

    def matcher(self, stop_ids: frozenset[int]) -> Matcher:
        """A matcher at the beginning. ``stop_ids``: tokens that end the continuation that it is for."""
        matcher = Matcher(self, self._root.deep_copy(), self.vocabulary.eos_ids - stop_ids)
        matcher.begin(self._first)
        return matcher

    @property
    def is_costly(self) -> bool:
        """Following it takes so long that others would notice."""
        return self._at_once_s < 0

    def note_guess(self, taken_s: float) -> None:
        """Count processor time that went into a token which may not come."""
        self._left_s -= taken_s
        self._at_once_s = max(-AT_ONCE_S, self._at_once_s - taken_s)

    def spend(self, taken_s: float) -> None:
        """Count processor time of one token. Raises ``InvalidField`` when there is none left."""
        self._left_s = min(FIRST_S, self._left_s + TOKEN_S - taken_s)
        self._at_once_s = min(AT_ONCE_S, max(-AT_ONCE_S, self._at_once_s + AT_ONCE_TOKEN_S - taken_s))
        if self._left_s < 0:
            limit = f"{FIRST_S:g} s and {TOKEN_S * 1e3:g} ms more a token"
            raise InvalidField(self.field, f"is too costly to follow: it takes more processor time than {limit}")


class Matcher:
    """Follows one continuation. For one thread at a time.

    ``mask``: int32 [ceil(vocab_size / 32)]; token v is allowed when bit v % 32 of word v // 32 is set. ``unwanted``:
    end-of-sequence tokens that do not end this continuation; they are taken out. ``foreseen``: what ``foresee`` found
    last, as far as it has come true since.
    """

    def __init__(self, constraint: Constraint, state: LLMatcher, unwanted: frozenset[int]) -> None:
        self.constraint = constraint
        self.mask: Any = np.zeros((constraint.vocab_size + 31) // 32, np.int32)
        self._state = state
        self._unwanted = unwanted
        self._is_first = len(constraint.vocabulary.twin_ids) > 0
        self.foreseen: list[Foreseen] = []
        self._settled: bool | Exception = False

    def begin(self, mask: Any) -> None:
        """Take over the mask of the beginning, which is the same for all."""
        self.mask[:] = mask
        _clear(self.mask, self._unwanted)

    def advance(self, token_id: int) -> bool:
        """Follow a token; True when the text is complete: nothing may follow any more.

        Raises ``InvalidField`` when the text can neither end nor go on, or following it takes more than the limits.
        """
        start = time.thread_time()
        foreseen, self.foreseen = self.foreseen, []
        self._consume(token_id)
        if foreseen and foreseen[0].token_id == token_id:
            self.mask, self.foreseen = foreseen[0].mask, foreseen[1:]
            is_complete = False
        else:
            is_complete = self.look()
        self.constraint.spend(time.thread_time() - start)
        return is_complete

    @property
    def is_costly(self) -> bool:
        """``advance`` belongs aside: the request has taken more time than others should wait for."""
        return self.constraint.is_costly

    def advance_aside(self, token_id: int, done: Callable[[], None]) -> None:
        """As ``advance``, on another thread. ``done`` is called there when ``settled`` has the result; until then
        nothing else may be asked of the matcher.
        """

        def follow() -> None:
            try:
                self._settled = self.advance(token_id)
            except Exception as error:  # whatever it is, the stream waits for it
                self._settled = error
            done()

        aside(follow)

    def settled(self) -> bool:
        """What ``advance`` would have returned or raised."""
        if isinstance(self._settled, Exception):
            raise self._settled
        return self._settled

    def foresee(self, guesses: list[int], most: int) -> list[int]:
        """At most ``most`` tokens to come: those that must, and ``guesses`` where these may.

        The text can go on behind each of them, with ``foreseen``. Nothing moves. There are none while following is
        costly, nor before a text has begun.
        """
        self.foreseen = []
        if self._is_first:
            return []
        ahead = Matcher(self.constraint, self._state.deep_copy(), self._unwanted)
        ahead.mask, ahead._is_first = self.mask, False
        for place in range(most):
            token_id = ahead._only_token()
            if token_id is None and place < len(guesses):
                token_id = guesses[place]
            if token_id is None or self.constraint.is_costly or not ahead._may_follow(token_id):
                break
            if guesses[place : place + 1] != [token_id]:
                guesses = []
            self.foreseen.append(Foreseen(token_id, ahead.mask))
        return [each.token_id for each in self.foreseen]

    def _only_token(self) -> int | None:
        """The one token that may follow, if it is one."""
        (places,) = self.mask.nonzero()
        word = int(self.mask[places[0]]) & 0xFFFFFFFF if len(places) == 1 else 0
        return int(places[0]) * 32 + word.bit_length() - 1 if word.bit_count() == 1 else None

    def _may_follow(self, token_id: int) -> bool:
        """Follow a token that need not come, with a mask of its own; whether the text can go on behind it."""
        if not self.allows(token_id) or token_id in self.constraint.vocabulary.eos_ids:
            return False
        start = time.thread_time()
        self.mask = np.zeros_like(self.mask)
        try:
            self._consume(token_id)
            return not self.look()
        except InvalidField:
            return False
        finally:
            self.constraint.note_guess(time.thread_time() - start)

    def _consume(self, token_id: int) -> None:
        if not self._state.consume_token(self._spelled(token_id)):
            raise InvalidField(self.constraint.field, f"cannot be followed: {shorten(self._state.get_error())}")

    def look(self) -> bool:
        """Read the mask of the present state; as ``advance``."""
        self._read_mask()
        if self._state.is_error():
            problem = f"{NOT_TO_BE_FOLLOWED}: {shorten(self._state.get_error())}"
            raise InvalidField(self.constraint.field, problem)
        if spare := self.constraint.vocab_size % 32:
            self.mask[-1:].view(np.uint32)[:] &= np.uint32((1 << spare) - 1)
        eos_ids = self.constraint.vocabulary.eos_ids
        may_end = any(self.allows(token_id) for token_id in eos_ids)
        going_on = self.mask.copy()
        _clear(going_on, eos_ids)
        if not going_on.any():
            if may_end:
                return True
            raise InvalidField(self.constraint.field, "no token of the model's vocabulary can go on with the text")
        _clear(self.mask, self._unwanted)
        return False

    def allows(self, token_id: int) -> bool:
        return bool(int(self.mask[token_id // 32]) >> (token_id % 32) & 1)

    def allows_any_but(self, banned: Iterable[int]) -> bool:
        """Whether a token may follow that is not among ``banned``."""
        left = self.mask.copy()
        _clear(left, banned)
        return bool(left.any())

    def _spelled(self, token_id: int) -> int:
        """The id that stands for the token where it is. Special tokens are no text: the next one is the first still."""
        vocabulary = self.constraint.vocabulary
        if not self._is_first or token_id in vocabulary.special_ids:
            return token_id
        self._is_first = False
        place = int(np.searchsorted(vocabulary.first_ids, token_id))
        has_twin = place < len(vocabulary.first_ids) and vocabulary.first_ids[place] == token_id
        return int(vocabulary.twin_ids[place]) if has_twin else token_id

    def _read_mask(self) -> None:
        vocabulary = self.constraint.vocabulary
        num_words = (vocabulary.num_ids + 31) // 32
        words = self.mask if num_words == len(self.mask) else np.empty(num_words, np.int32)
        self._state.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._is_first:
            bits = np.unpackbits(words.view(np.uint8), bitorder="little")
            bits[vocabulary.first_ids] = bits[vocabulary.twin_ids]
            words = np.packbits(bits, bitorder="little").view(np.int32)
        if words is not self.mask:
            self.mask[:] = words[: len(self.mask)]


def _unforced(grammar: str) -> str:
    """The same grammar, for a vocabulary that spells nothing by itself."""
    if grammar.lstrip().startswith("{"):
        (main,) = json.loads(grammar)["grammars"]
    else:
        main = {"lark_grammar": grammar}
    root = {"lark_grammar": '%llguidance {"no_forcing": true}\nstart: @main'}
    return json.dumps({"grammars": [root, main | {"name": "main"}]})


def _clear(mask: Any, token_ids: Iterable[int]) -> None:
    words = mask.view(np.uint32)
    for token_id in token_ids:
        words[token_id // 32] &= np.uint32(~(1 << (token_id % 32)) & 0xFFFFFFFF)
