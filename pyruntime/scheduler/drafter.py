"""What one sequence guesses ahead of itself, and whether its guesses have been right of late."""

from __future__ import annotations

import math
from collections.abc import Sequence as Tokens
from itertools import takewhile

from pyruntime.scheduler.lookup import Lookup, following

# Guesses behind so many equal tokens are counted apart from those behind fewer: they are right far more often.
LONG_MATCH = 6
# What is taken for the rates before anything is known.
FIRST_RATES = 0.5, 0.8
# Weight of the newest guess in the moving average.
SPEED = 0.15
# A rate of 1 would never be doubted.
HIGHEST_RATE = 0.98
# Chances to guess that are let pass between two tries while guesses do not pay; doubled by every try in vain.
FIRST_PAUSE, LAST_PAUSE = 8, 128


class Acceptance:
    """How often guesses of one kind are right: a moving average over single tokens."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._pause = FIRST_PAUSE
        self._num_passed = 0

    def num_worthwhile(self, least: float, most: int) -> int:
        """How many of ``most`` drafts to make, when one must be right with probability ``least`` to pay for its row.

        The i-th counts only if all before it are right, so its probability is the rate to the power of i.
        """
        if self.rate >= least:
            return min(most, max(int(math.log(least) / math.log(self.rate)), 1))
        self._num_passed += 1
        if self._num_passed <= self._pause:
            return 0
        self._num_passed = 0
        return min(most, 1)

    def note(self, num_right: int, num_wrong: int) -> None:
        """What came of drafts that were verified together; those behind the first wrong one say nothing."""
        for outcome, count in ((1.0, num_right), (0.0, num_wrong)):
            for _ in range(count):
                self.rate += SPEED * (outcome - self.rate)
        self.rate = min(self.rate, HIGHEST_RATE)
        self._pause = FIRST_PAUSE if num_right else min(2 * self._pause, LAST_PAUSE)


class Drafter:
    """Drafts of one sequence. They may be wrong without harm, as each is verified before it counts."""

    def __init__(self) -> None:
        self._lookup = Lookup()
        self.read = self._lookup.read
        self._acceptances = [Acceptance(rate) for rate in FIRST_RATES]
        self._kind = self._acceptances[0]
        self._proposed: list[int] = []
        self._offered: list[int] = []
        self._offered_at = 0

    def propose(self, token_ids: Tokens[int], least: float, most: int) -> list[int]:
        """At most ``most`` tokens that may follow, as ``Acceptance.num_worthwhile``; often none.

        None until all of ``token_ids`` are read.
        """
        self._learn(token_ids)
        place, num_equal = self._lookup.find(token_ids)
        self._proposed = []
        if num_equal:
            self._kind = self._acceptances[num_equal >= LONG_MATCH]
            self._proposed = following(token_ids, place, self._kind.num_worthwhile(least, most))
        return self._proposed

    def offer(self, token_ids: Tokens[int], drafts: list[int]) -> None:
        """What the next step verifies. Drafts that others made, instead or behind, teach nothing here."""
        shared = zip(drafts, self._proposed, strict=False)
        self._offered = [draft for draft, _ in takewhile(lambda pair: pair[0] == pair[1], shared)]
        self._offered_at = len(token_ids)

    def _learn(self, token_ids: Tokens[int]) -> None:
        """Compare the last offer with what came, however many steps ago that was, and if it came at all."""
        drafts, self._offered = self._offered, []
        came = token_ids[self._offered_at : self._offered_at + len(drafts)]
        if not came:
            return
        num_right = next((i for i, (a, b) in enumerate(zip(drafts, came, strict=False)) if a != b), len(came))
        self._kind.note(num_right, int(num_right < len(came)))
