"""Which keys a model whose every layer has a sliding window still reads.

Only such a model forgets: where some layers see the whole text (Gemma 3 has one of them after five with a window),
one block table serves all layers, every block is read to the end, and the window here is None.
"""

from __future__ import annotations

# The attention kernels read keys in tiles of this many, from a multiple of it on, and mask what the window hides:
# the whole tile has to lie in blocks that are still the sequence's.
KEYS_A_TILE = 64


def first_read(position: int, window: int | None) -> int:
    """The first key that a token at ``position`` or later may touch; a query sees itself and window - 1 before."""
    if window is None:
        return 0
    return max(position - window + 1, 0) // KEYS_A_TILE * KEYS_A_TILE
