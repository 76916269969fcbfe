"""Token ids of a sequence behind a prefix that many sequences have in common, which is stored once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import overload


class SharedTokens(Sequence[int]):
    """Reads as ``prefix + own``, and holds of ``prefix`` a reference alone. The prefix must not change any more.

    Slices are plain lists. As fast as a list where it is read, block by block and chunk by chunk.
    """

    __slots__ = ("own", "prefix")

    def __init__(self, prefix: list[int], own: list[int]) -> None:
        self.prefix = prefix
        self.own = own

    def __len__(self) -> int:
        return len(self.prefix) + len(self.own)

    def __iter__(self) -> Iterator[int]:
        return chain(self.prefix, self.own)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        border = len(self.prefix)
        if isinstance(index, int):
            place = index + len(self) if index < 0 else index
            if not 0 <= place < len(self):
                raise IndexError(f"token {index} of {len(self)}")
            return self.prefix[place] if place < border else self.own[place - border]
        start, stop, step = index.indices(len(self))
        if step != 1:
            return [*self][index]
        if start >= border:
            return self.own[start - border : max(stop - border, 0)]
        return self.prefix[start:stop] + self.own[: max(stop - border, 0)]

    def append(self, token_id: int) -> None:
        self.own.append(token_id)
