"""Drafts beside the decode rows of a step: how many rows they may take, and whose they are.

A step with few rows takes the time of reading the weights, so rows more cost little; at many rows each costs its
full share. A draft of a sequence is one row more of its chunk. Every row is sampled as the step that would have
computed it alone samples it, and tokens count up to the first that its draft did not foresee (``heads/sampler.py``),
so drafts change when tokens come and never which.
"""

from __future__ import annotations

from pyruntime.scheduler.drafter import Drafter
from pyruntime.scheduler.memory import Memory
from pyruntime.scheduler.plan import StepPlan
from pyruntime.scheduler.sequence import Sequence

# Rows that cost as much as what a step costs without any. For Gemma 3 270M on two cores a step takes 12 ms with one
# row, 14 with four, 21 with sixteen and 60 with 64, so a row costs half a millisecond at first and 0.8 later.
BASE_ROWS = 12
# Tokens that are taken into the streams' indices in a step: about a third of a millisecond. Long prompts take several.
MOST_READ = 2048


class Speculation:
    """Drafts for the streams of one scheduler.

    ``max_tokens``: most drafts of a sequence in a step. ``max_rows``: most decode rows and drafts of a step together;
    with that many streams there are no drafts.
    """

    def __init__(self, max_tokens: int, max_rows: int) -> None:
        self._max_tokens = max_tokens
        self._max_rows = max_rows
        self._num_to_read = 0
        self.num_drafted = 0

    def extend(self, plan: StepPlan, memory: Memory, most: int, spare: int) -> None:
        """Add at most ``most`` drafts to a plan that is otherwise complete. ``spare`` blocks are left free."""
        streams = [sequence for sequence, _ in plan.entries if sequence.is_decoding]
        num_left = min(self._max_rows - len(streams), most)
        if not streams or num_left <= 0:
            return
        # Rows that cost as much as the whole step must bring as many tokens as it brings without them.
        least = len(streams) / (BASE_ROWS + len(streams))
        self._num_to_read = MOST_READ
        proposals = [(sequence, self._propose(sequence, least, num_left)) for sequence in streams]
        for sequence, drafts in _shared_out(proposals, num_left):
            count = memory.reserve_ahead(sequence, len(drafts), spare)
            if count:
                self._offer(plan, sequence, drafts[:count])

    def _propose(self, sequence: Sequence, least: float, num_left: int) -> list[int]:
        # Each verified draft is a token and the last row gives one more.
        most = min(self._max_tokens, num_left, sequence.draft_limit - len(sequence) - 1)
        if most < 1:
            return []
        if sequence.drafter is None:
            sequence.drafter = Drafter()
        self._num_to_read -= sequence.drafter.read(sequence.token_ids, self._num_to_read)
        guesses = sequence.drafter.propose(sequence.token_ids, least, most)
        return guesses if sequence.matcher is None else sequence.matcher.foresee(guesses, most)

    def _offer(self, plan: StepPlan, sequence: Sequence, drafts: list[int]) -> None:
        assert sequence.drafter is not None
        sequence.drafter.offer(sequence.token_ids, drafts)
        plan.draft(sequence, drafts)
        self.num_drafted += len(drafts)


def _shared_out(proposals: list[tuple[Sequence, list[int]]], num_left: int) -> list[tuple[Sequence, list[int]]]:
    """The first draft of each, then the second, until none are left: later ones are less likely right."""
    counts = [0] * len(proposals)
    for depth in range(max(len(drafts) for _, drafts in proposals)):
        for place, (_, drafts) in enumerate(proposals):
            if depth < len(drafts) and num_left:
                counts[place] += 1
                num_left -= 1
    return [(sequence, drafts[:count]) for (sequence, drafts), count in zip(proposals, counts, strict=True) if count]
