"""How much of a step prompts may take, in tokens and in cost: depth is paid for, streams are not held up."""

from __future__ import annotations

from dataclasses import dataclass

from pyruntime.scheduler.cost import CostModel
from pyruntime.scheduler.plan import StepPlan
from pyruntime.scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True)
class StepLimits:
    """``max_tokens``: most tokens in a step, and most token equivalents of its prompts.

    Beside streams, prompts get at most ``max_beside`` token equivalents, and so few that the step costs at most
    ``pause_factor`` times what it costs without them, its fixed part of ``base_tokens`` token equivalents included
    (reading the weights once; 40 to 55 for Gemma 3 270M on two cores). A factor of 0 sets no such limit.
    """

    max_tokens: int
    max_beside: int
    pause_factor: float
    base_tokens: int
    costs: CostModel

    def for_prompts(self, plan: StepPlan) -> PromptBudget:
        """What is left for prompts in a step whose ``plan`` has its decode rows."""
        tokens = self.max_tokens - plan.num_tokens
        cost = tokens
        if plan.entries:
            cost = min(cost, self.max_beside)
            if self.pause_factor:
                cost = min(cost, int((self.pause_factor - 1) * (self.base_tokens + plan.cost)))
        return PromptBudget(self.costs, tokens, cost, is_first=True, is_alone=not plan.entries)


@dataclass(slots=True)
class PromptBudget:
    """The rest of one step. ``is_first``: no prompt has had any of it; ``is_alone``: the step has no row at all yet."""

    costs: CostModel
    tokens: int
    cost: int
    is_first: bool
    is_alone: bool

    @property
    def is_spent(self) -> bool:
        return self.tokens < 1 or (self.cost < 1 and not self.is_first)

    def chunk(self, sequence: Sequence, num_remaining: int, depth: int) -> int:
        """How many of ``num_remaining`` tokens behind ``depth`` may run. The first prompt gets one at any depth."""
        if num_remaining < 1:
            return 0
        most = min(num_remaining, self.tokens, self.costs.most_tokens(self.cost, depth, sequence.row_reads))
        return 1 if most < 1 and self.is_first and self.tokens >= 1 else most

    def whole(self, num_tokens: int) -> bool:
        """Whether a sequence that cannot be cut may run; alone it may exceed the budget."""
        return self.is_alone or (num_tokens <= self.tokens and self.costs.cost(num_tokens, 0) <= self.cost)

    def spend(self, sequence: Sequence, num_tokens: int, plan: StepPlan) -> int:
        """Put the chunk into the plan; returns what it costs."""
        cost = self.costs.cost(num_tokens, sequence.num_computed, sequence.row_reads)
        plan.add(sequence, num_tokens, cost)
        self.tokens -= num_tokens
        self.cost -= cost
        self.is_first = self.is_alone = False
        return cost
