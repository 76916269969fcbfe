"""The policy: which sequences run in the next step, and how many of their tokens.

Decode rows are always in; running prompts go on in order of priority and arrival; what is left of the
token budget admits waiting sequences of any task. Prompts of causal models are cut into chunks.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator

from pyruntime.scheduler.blocks import BlockPool
from pyruntime.scheduler.plan import StepPlan
from pyruntime.scheduler.prefix_cache import PrefixCache
from pyruntime.scheduler.sequence import Sequence, State
from pyruntime.scheduler.sharing import Shared, shared_by


class Scheduler:
    """Owns every live sequence of one model. Used from the step thread only.

    ``blocks`` is None for models without a key/value cache (encoders): their sequences run whole.
    ``max_prompt_tokens_beside``: most tokens that are not decode rows in a step that has some, so that
    a long prompt does not hold running streams up; 0 sets no such limit.
    """

    def __init__(
        self,
        blocks: BlockPool | None,
        max_batch_tokens: int,
        max_running: int,
        max_prompt_tokens_beside: int = 0,
        prefix_cache: PrefixCache | None = None,
    ) -> None:
        self.blocks = blocks
        self.prefix_cache = prefix_cache
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
            if self.prefix_cache is not None and sequence.reuses_prefix:
                self.prefix_cache.insert(
                    sequence.token_ids, sequence.cache_nodes, sequence.blocks, sequence.num_computed
                )
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
            shared = self._room_for(sequence, idle=not self.running and not plan.entries)
            if shared is None:
                return
            num_tokens = len(sequence) - shared.num_tokens
            if self.blocks is not None:
                num_tokens = min(num_tokens, budget)
            elif num_tokens > budget and plan.entries:
                return  # it cannot be cut, but alone it may exceed the budget
            heapq.heappop(self._waiting)
            self._num_waiting -= 1
            self._share(sequence, shared, plan)
            self._reserve(sequence, num_tokens)
            sequence.state = State.RUNNING
            self.running.add(sequence)
            plan.add(sequence, num_tokens)

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

    def _room_for(self, sequence: Sequence, idle: bool) -> Shared | None:
        """What the sequence shares, if the rest of its prompt fits now; a half-fitting one would only be preempted.

        ``idle``: nothing else runs, so what is held for other requests' children has to give way.
        """
        shared = shared_by(sequence, self.blocks, self.prefix_cache)
        if self._fits(sequence, shared):
            return shared
        if not idle:
            return None
        self._evict_holders(self._num_blocks, keep=sequence.parent)
        if not self._fits(sequence, shared):
            self._evict_holders(self._num_blocks)
            shared = shared_by(sequence, self.blocks, self.prefix_cache)
        return shared if self._fits(sequence, shared) else None

    def _fits(self, sequence: Sequence, shared: Shared) -> bool:
        if self.blocks is None:
            return True
        # Blocks that an earlier request left count as free until they are shared.
        taken = self.blocks.blocks_for(len(sequence)) - len(shared.blocks) + self.blocks.num_idle(shared.blocks)
        return taken <= self.blocks.num_free

    @property
    def _num_blocks(self) -> int:
        return self.blocks.num_blocks if self.blocks is not None else 0

    def _share(self, sequence: Sequence, shared: Shared, plan: StepPlan) -> None:
        """Take references to full blocks; a half-filled one is copied before the step's forward."""
        if self.blocks is None:
            return
        sequence.blocks = self.blocks.share(shared.blocks)
        sequence.cache_nodes = list(shared.nodes)
        sequence.num_computed = sequence.cached_tokens = shared.num_tokens
        if shared.partial is not None:
            (target,) = self.blocks.allocate(1)
            plan.block_copies.append((shared.partial, target))
            sequence.blocks.append(target)
        parent = sequence.parent
        if parent is None:
            return
        if parent.is_prefix and sequence.index == 0:
            # The first item behind a prefix pays for it, so that prompt minus cached tokens is the work done.
            sequence.cached_tokens = min(parent.cached_tokens, shared.num_tokens)
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
        sequence.cache_nodes = []
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
