"""Where the newest tokens of a sequence came before: prompt lookup, by an index that grows with the tokens.

What followed an earlier occurrence is a fair guess of what follows now, in texts that quote, list or rewrite their
prompt (Saxena, "Prompt Lookup Decoding", 2023). The index is that of dictionary compressors (LZ77 with hash chains):
from the last three tokens to the latest place behind them, and from there to the place before.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Tokens

# Fewer equal tokens say little about the next one.
MIN_MATCH = 3
# More of them say no more.
MAX_MATCH = 16
# Places looked at, latest first: the time of a search does not depend on how often the tokens came.
MAX_PLACES = 4
# Keys of a generation; two are kept, so about so many to twice as many of the latest tokens are found again. A key
# takes about 130 bytes.
MAX_KEYS = 2**14

# Ids are below 2^20 (``ops/sampling.py``), so a key of three fits into 60 bits; others would share keys, which costs
# time alone, since what is found is compared.
_ID_BITS = 20
_KEY_MASK = (1 << _ID_BITS * MIN_MATCH) - 1
_NOWHERE = -1


class Lookup:
    """Of one sequence, whose tokens it does not keep: each call gets them all, and they only ever grow."""

    def __init__(self) -> None:
        self._latest: dict[int, int] = {}
        self._older: dict[int, int] = {}
        self._before = array("i")  # of each place, the one before it behind the same three tokens
        self._key = 0  # of the last three tokens read

    def read(self, token_ids: Tokens[int], most: int) -> int:
        """Take in at most ``most`` of the tokens that are new; how many it were."""
        first = len(self._before)
        last = min(len(token_ids), first + most)
        latest, older, before, key = self._latest, self._older, self._before, self._key
        for place, token in enumerate(token_ids[first:last], first):
            found = latest.get(key)
            before.append(older.get(key, _NOWHERE) if found is None else found)
            latest[key] = place
            key = (key << _ID_BITS | token) & _KEY_MASK
        self._key = key
        if len(latest) > MAX_KEYS:
            self._latest, self._older = {}, latest
        return last - first

    def find(self, token_ids: Tokens[int]) -> tuple[int, int]:
        """(place, number of tokens before it that equal the newest ones), the longest; number 0 if there is none.

        There is none until all of ``token_ids`` have been read.
        """
        if len(self._before) < len(token_ids):
            return 0, 0
        newest = token_ids[-MAX_MATCH:]
        best = 0, 0
        place = self._latest.get(self._key, self._older.get(self._key, _NOWHERE))
        for _ in range(MAX_PLACES):
            if place == _NOWHERE or best[1] == MAX_MATCH:
                break
            num_equal = _common_end(newest, token_ids[max(place - MAX_MATCH, 0) : place])
            if num_equal >= MIN_MATCH and num_equal > best[1]:
                best = place, num_equal
            place = self._before[place]
        return best


def following(token_ids: Tokens[int], place: int, count: int) -> list[int]:
    """``count`` tokens from ``place`` on; where the sequence ends before, as if it went on repeating from there."""
    found = list(token_ids[place : place + count])
    period = len(token_ids) - place
    for offset in range(len(found), count):
        found.append(found[offset - period])
    return found


def _common_end(left: Tokens[int], right: Tokens[int]) -> int:
    count = 0
    for a, b in zip(reversed(left), reversed(right), strict=False):
        if a != b:
            break
        count += 1
    return count
