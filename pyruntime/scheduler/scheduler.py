"""The policy: which sequences run in the next step, and how many of their tokens.

Decode rows are always in; running prompts go on in order of priority and arrival; what is left of the
token budget admits waiting sequences of any task. Prompts of causal models are cut into chunks.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from pyruntime.scheduler.blocks import BlockPool
from pyruntime.scheduler.sequence import Sequence, State


@dataclass(slots=True)
class StepPlan:
    """What one step runs: (sequence, number of its next tokens), and block copies to make first."""

    entries: list[tuple[Sequence, int]] = field(default_factory=list)
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    num_tokens: int = 0

    def add(self, sequence: Sequence, num_tokens: int) -> None:
        self.entries.append((sequence, num_tokens))
        self.num_tokens += num_tokens


class Scheduler:
    """Owns every live sequence of one model. Used from the step thread only.

    ``blocks`` is None for models without a key/value cache (encoders): their sequences run whole.
    ``max_prompt_tokens_beside``: most tokens that are not decode rows in a step that has some, so that
    a long prompt does not hold running streams up; 0 sets no such limit.
    """

    def __init__(
        self, blocks: BlockPool | None, max_batch_tokens: int, max_running: int, max_prompt_tokens_beside: int = 0
    ) -> None:
        self.blocks = blocks
        self.max_batch_tokens = max_batch_tokens
        self.max_prompt_tokens_beside = max_prompt_tokens_beside or max_batch_tokens
        self.max_running = max_running
        self.running: set[Sequence] = set()
        self.holding: set[Sequence] = set()
        self._waiting: list[Sequence] = []
        self._num_waiting = 0
        self._arrivals = itertools.count()
        self._release_after_step: list[int] = []

    @property
    def num_waiting(self) -> int:
        return self._num_waiting

    @property
    def has_work(self) -> bool:
        return self._num_waiting > 0 or bool(self.running)

    # -- entering and leaving ---------------------------------------------------------------------

    def add(self, sequences: list[Sequence]) -> None:
        """Queue one request's sequences; those with a parent wait until its prompt is computed."""
        arrival = next(self._arrivals)
        for sequence in sequences:
            sequence.arrival = arrival
            if sequence.parent is None:
                self._enqueue(sequence)
            else:
                sequence.parent.children.append(sequence)
                sequence.parent.num_unforked += 1

    def finish(self, sequence: Sequence) -> None:
        """The sequence is done or cancelled: its blocks go back, unless children still fork from them."""
        if sequence.state is State.FINISHED:
            return
        if sequence.state is State.WAITING:
            self._num_waiting -= 1  # its heap entry is skipped later
        self.running.discard(sequence)
        self.holding.discard(sequence)
        unborn = sequence.state in (State.PENDING, State.WAITING) or sequence.num_computed < sequence.num_prompt
        if sequence.num_unforked > 0 and not unborn:
            self._hold(sequence)
            return
        parent = sequence.parent
        if parent is not None and self._leave_parent(sequence):
            self._release(parent)
        sequence.state = State.FINISHED
        self._release(sequence)
        self._free_children(sequence)

    def drop(self, sequence: Sequence) -> None:
        """As ``finish``, for a cancelled request: no child will come, so nothing is held."""
        sequence.num_unforked = 0
        sequence.children = []
        self.finish(sequence)

    def append_token(self, sequence: Sequence, token_id: int) -> None:
        sequence.token_ids.append(token_id)

    # -- the step ---------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """The next step; an empty plan means that nothing can run."""
        plan = StepPlan()
        ordered = sorted(self.running)
        scheduled: set[Sequence] = set()
        decoding = [s for s in ordered if s.is_decoding]
        prompts = [s for s in ordered if not s.is_decoding]
        for sequence in decoding:
            self._continue(sequence, plan, scheduled, self.max_batch_tokens)
        limit = self.max_batch_tokens
        if plan.entries:
            limit = min(limit, plan.num_tokens + self.max_prompt_tokens_beside)
        for sequence in prompts:
            self._continue(sequence, plan, scheduled, limit)
        self._admit(plan, limit)
        return plan

    def advance(self, plan: StepPlan) -> None:
        """The step ran: its tokens have keys and values now, and finished prompts release their children."""
        if self.blocks is not None and self._release_after_step:
            self.blocks.release(self._release_after_step)
            self._release_after_step = []
        for sequence, num_tokens in plan.entries:
            if sequence.state is not State.RUNNING:
                continue
            sequence.num_computed += num_tokens
            if sequence.children and sequence.num_computed >= sequence.num_prompt:
                self._free_children(sequence)
            if sequence.is_prefix and sequence.num_remaining == 0:
                self.running.discard(sequence)
                self._hold(sequence)

    def _continue(self, sequence: Sequence, plan: StepPlan, scheduled: set[Sequence], limit: int) -> None:
        budget = limit - plan.num_tokens
        if sequence.state is not State.RUNNING or (budget < 1 and not sequence.is_decoding):
            return
        num_tokens = min(sequence.num_remaining, max(budget, 1))
        while not self._reserve(sequence, num_tokens):
            victim = max(s for s in self.running if s not in scheduled)
            self._preempt(victim)
            if victim is sequence:
                return
        plan.add(sequence, num_tokens)
        scheduled.add(sequence)

    def _admit(self, plan: StepPlan, limit: int) -> None:
        for sequence in self._waiting_in_order():
            budget = limit - plan.num_tokens
            if len(self.running) >= self.max_running or (budget < 1 and plan.entries):
                return
            num_tokens = self._fitting(sequence, budget, plan)
            if num_tokens == 0 or not self._make_room(sequence, plan):
                return
            heapq.heappop(self._waiting)
            self._num_waiting -= 1
            self._fork(sequence, plan)
            num_tokens = min(num_tokens, sequence.num_remaining)
            self._reserve(sequence, num_tokens)
            sequence.state = State.RUNNING
            self.running.add(sequence)
            plan.add(sequence, num_tokens)

    def _fitting(self, sequence: Sequence, budget: int, plan: StepPlan) -> int:
        """How many tokens of a new sequence fit; a sequence that cannot be cut may exceed the budget alone."""
        remaining = len(sequence) - self._shareable(sequence)
        if self.blocks is not None:
            return min(remaining, budget)
        return remaining if remaining <= budget or not plan.entries else 0

    def _waiting_in_order(self) -> Iterator[Sequence]:
        while self._waiting:
            if self._waiting[0].state is not State.WAITING:
                heapq.heappop(self._waiting)
                continue
            yield self._waiting[0]

    # -- blocks -----------------------------------------------------------------------------------

    def _reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        """Blocks for the next ``num_tokens`` tokens; False (and nothing taken) when there are too few."""
        if self.blocks is None:
            return True
        missing = self.blocks.blocks_for(sequence.num_computed + num_tokens) - len(sequence.blocks)
        if missing > self.blocks.num_free:
            self._evict_holders(missing)
        if missing > self.blocks.num_free:
            return False
        if missing > 0:
            sequence.blocks += self.blocks.allocate(missing)
        return True

    def _make_room(self, sequence: Sequence, plan: StepPlan) -> bool:
        """Whether the whole prompt fits now; a half-fitting one would only be preempted again."""
        if self.blocks is None:
            return True
        wanted = self.blocks.blocks_for(len(sequence)) - self._shareable(sequence) // self.blocks.block_size
        if wanted > self.blocks.num_free and not self.running and not plan.entries:
            self._evict_holders(wanted, keep=sequence.parent)
            if wanted > self.blocks.num_free:
                self._evict_holders(wanted)
                wanted = self.blocks.blocks_for(len(sequence))
        return wanted <= self.blocks.num_free

    def _shareable(self, sequence: Sequence) -> int:
        """Tokens that need no computing: the parent's, but never the last, whose hidden row a head reads."""
        parent = sequence.parent
        if parent is None or self.blocks is None or sequence.num_computed > 0:
            return 0
        return min(parent.num_computed, parent.num_prompt, len(sequence) - 1) if parent.blocks else 0

    def _fork(self, sequence: Sequence, plan: StepPlan) -> None:
        """Share the parent's full blocks; its last, half-filled one is copied before the step's forward."""
        parent = sequence.parent
        if parent is None or self.blocks is None:
            return
        common = self._shareable(sequence)
        full, rest = divmod(common, self.blocks.block_size)
        sequence.blocks = self.blocks.share(parent.blocks[:full])
        if rest:
            (target,) = self.blocks.allocate(1)
            plan.block_copies.append((parent.blocks[full], target))
            sequence.blocks.append(target)
        sequence.num_computed = common
        # The first item behind a prefix pays for it, so that prompt minus cached tokens is the work done.
        sequence.cached_tokens = 0 if parent.is_prefix and sequence.index == 0 else common
        # The copy reads the parent's block in this step, so a parent without further children goes after it.
        if self._leave_parent(sequence):
            self._release_after_step += parent.blocks
            parent.blocks = []

    def _leave_parent(self, sequence: Sequence) -> bool:
        """One child fewer to wait for; True when the parent was held for this child alone and is done now."""
        parent, sequence.parent = sequence.parent, None
        if parent is None or parent.num_unforked == 0:
            return False
        parent.num_unforked -= 1
        if parent.num_unforked > 0 or parent.state is not State.HOLDING:
            return False
        self.holding.discard(parent)
        parent.state = State.FINISHED
        return True

    def _hold(self, sequence: Sequence) -> None:
        sequence.state = State.HOLDING
        self.holding.add(sequence)
        if sequence.num_unforked == 0:
            self.finish(sequence)

    def _evict_holders(self, wanted: int, keep: Sequence | None = None) -> None:
        """Under pressure, blocks held for children go first: the children compute their prefix themselves."""
        for holder in sorted(self.holding, reverse=True):
            if self.blocks is None or wanted <= self.blocks.num_free:
                return
            if holder is not keep:
                self.holding.discard(holder)
                holder.state = State.FINISHED
                self._release(holder)

    def _preempt(self, sequence: Sequence) -> None:
        """Give the blocks up and queue again; its tokens, generated ones too, are computed anew later."""
        self.running.discard(sequence)
        self._release(sequence)
        sequence.num_computed = 0
        sequence.partial_hidden.clear()
        self._enqueue(sequence)

    def _release(self, sequence: Sequence) -> None:
        if self.blocks is not None and sequence.blocks:
            self.blocks.release(sequence.blocks)
        sequence.blocks = []

    def _free_children(self, sequence: Sequence) -> None:
        children, sequence.children = sequence.children, []
        for child in children:
            if child.state is State.PENDING:
                self._enqueue(child)

    def _enqueue(self, sequence: Sequence) -> None:
        sequence.state = State.WAITING
        self._num_waiting += 1
        heapq.heappush(self._waiting, sequence)
