"""Tokens of rows that want the largest logit alone, by the head's screen instead of all logits."""

from __future__ import annotations

from typing import Any

import torch

from pyruntime.heads.sampling_rows import neighbours, wants_largest
from pyruntime.model.output_head import OutputHead

# From here on rows pay for a screen of their own beside others, for which the whole matrix is read anyway.
LEAST_BESIDE = 16
# How many steps go without the screen after one in which it left most rows open.
PAUSE = 32


class Greedy:
    """Whatever is found here, or left open, is the token that all logits give."""

    def __init__(self, head: OutputHead) -> None:
        self._head = head
        self._pause = 0

    def find(self, hidden: torch.Tensor, last: list[int], sequences: list[Any]) -> dict[int, int]:
        """Place in ``last`` → token id, for those of the hidden rows ``last``, each with its sequence, that the screen
        decides; of the others all logits are needed."""
        if self._head.screen is None:
            return {}
        if self._pause:
            self._pause -= 1
            return {}
        wanting = [row for row, sequence in enumerate(sequences) if wants_largest(sequence)]
        if len(wanting) < min(len(last), LEAST_BESIDE):
            return {}
        places = [last[row] for row in wanting]
        rows = neighbours(hidden, places)
        ids = self._head.largest(hidden[torch.tensor(places)] if rows is None else rows)
        found = {row: token for row, token in zip(wanting, ids, strict=True) if token >= 0}
        if 2 * len(found) < len(wanting):
            self._pause = PAUSE
        return found
