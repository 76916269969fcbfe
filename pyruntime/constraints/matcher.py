"""What may come next in one continuation, as a bitmask over the vocabulary."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from llguidance import LLMatcher

from pyruntime.constraints.grammar import shorten
from pyruntime.errors import InvalidField


class Constraint:
    """A compiled constraint of one model, the same for all requests that name it.

    ``field``: its proto path, for errors. ``vocab_size``: logits of the model. ``eos_ids``: its end-of-sequence tokens,
    which are allowed where the text may end. Raises ``InvalidField`` when no text but the empty one can be spelled.
    """

    def __init__(self, root: LLMatcher, field: str, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self.field = field
        self.vocab_size = vocab_size
        self.eos_ids = eos_ids
        self._root = root
        first = Matcher(self, root, frozenset())
        if first.look():
            raise InvalidField(field, "no text conforms to it but the empty one")
        self._first = first.mask

    def matcher(self, stop_ids: frozenset[int]) -> Matcher:
        """A matcher at the beginning. ``stop_ids``: tokens that end the continuation that it is for."""
        matcher = Matcher(self, self._root.deep_copy(), self.eos_ids - stop_ids)
        matcher.begin(self._first)
        return matcher


class Matcher:
    """Follows one continuation. For one thread at a time.

    ``mask``: int32 [ceil(vocab_size / 32)]; token v is allowed when bit v % 32 of word v // 32 is set. ``unwanted``:
    end-of-sequence tokens that do not end this continuation; they are taken out.
    """

    def __init__(self, constraint: Constraint, state: LLMatcher, unwanted: frozenset[int]) -> None:
        self.constraint = constraint
        self.mask: Any = np.zeros((constraint.vocab_size + 31) // 32, np.int32)
        self._state = state
        self._unwanted = unwanted

    def begin(self, mask: Any) -> None:
        """Take over the mask of the beginning, which is the same for all."""
        self.mask[:] = mask
        _clear(self.mask, self._unwanted)

    def advance(self, token_id: int) -> bool:
        """Follow a token; True when the text is complete: nothing may follow any more.

        Raises ``InvalidField`` when the text can neither end nor go on, or following it takes more than the limits.
        """
        if not self._state.consume_token(token_id):
            raise InvalidField(self.constraint.field, f"cannot be followed: {shorten(self._state.get_error())}")
        return self.look()

    def look(self) -> bool:
        """Read the mask of the present state; as ``advance``."""
        self._state.unsafe_compute_mask_ptr(self.mask.ctypes.data, self.mask.nbytes)
        if self._state.is_error():
            problem = "no text conforms to it, or it is too costly to follow"
            raise InvalidField(self.constraint.field, f"{problem}: {shorten(self._state.get_error())}")
        if spare := self.constraint.vocab_size % 32:
            self.mask[-1:].view(np.uint32)[:] &= np.uint32((1 << spare) - 1)
        may_end = any(self.allows(token_id) for token_id in self.constraint.eos_ids)
        going_on = self.mask.copy()
        _clear(going_on, self.constraint.eos_ids)
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


def _clear(mask: Any, token_ids: Iterable[int]) -> None:
    words = mask.view(np.uint32)
    for token_id in token_ids:
        words[token_id // 32] &= np.uint32(~(1 << (token_id % 32)) & 0xFFFFFFFF)
