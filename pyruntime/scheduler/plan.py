"""What the scheduler decided for one step."""

from __future__ import annotations

from dataclasses import dataclass, field

from pyruntime.scheduler.sequence import Sequence


@dataclass(slots=True)
class StepPlan:
    """What one step runs: (sequence, number of its next tokens), and block copies to make first."""

    entries: list[tuple[Sequence, int]] = field(default_factory=list)
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    num_tokens: int = 0

    def add(self, sequence: Sequence, num_tokens: int) -> None:
        self.entries.append((sequence, num_tokens))
        self.num_tokens += num_tokens
