"""What the scheduler decided for one step."""

from __future__ import annotations

from dataclasses import dataclass, field

from pyruntime.scheduler.sequence import Sequence, State


@dataclass(slots=True)
class StepPlan:
    """What one step runs: (sequence, number of its next tokens), and block copies to make first.

    ``drafts``: of some entries, guesses of the tokens behind theirs, which run as well (``speculation.py``); counted in
    ``num_tokens``, not in the entry. ``cost``: of all entries, in the token equivalents of ``CostModel``.
    """

    entries: list[tuple[Sequence, int]] = field(default_factory=list)
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    drafts: dict[Sequence, list[int]] = field(default_factory=dict)
    num_tokens: int = 0
    cost: int = 0
    _members: set[Sequence] = field(default_factory=set, repr=False)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._members

    def add(self, sequence: Sequence, num_tokens: int, cost: int = 0) -> None:
        self.entries.append((sequence, num_tokens))
        self._members.add(sequence)
        self.num_tokens += num_tokens
        self.cost += cost or num_tokens

    def draft(self, sequence: Sequence, token_ids: list[int]) -> None:
        """Guesses behind an entry that reaches the end of what is known of its sequence."""
        self.drafts[sequence] = token_ids
        self.num_tokens += len(token_ids)

    def halves(self) -> tuple[StepPlan, StepPlan]:
        """The entries that still run, in two halves of equal number; a copy goes with the half that reads its target.

        The first half has the odd one, so a plan of one entry gives itself and an empty plan.
        """
        alive = [(sequence, count) for sequence, count in self.entries if sequence.state is State.RUNNING]
        middle = (len(alive) + 1) // 2
        return self._part(alive[:middle]), self._part(alive[middle:])

    def _part(self, entries: list[tuple[Sequence, int]]) -> StepPlan:
        blocks = {block for sequence, _ in entries for block in sequence.blocks}
        part = StepPlan(block_copies=[copy for copy in self.block_copies if copy[1] in blocks])
        for sequence, num_tokens in entries:
            part.add(sequence, num_tokens)
            if drafts := self.drafts.get(sequence):
                part.draft(sequence, drafts)
        return part
