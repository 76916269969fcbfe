"""The policy: which sequences run in the next step, and how many of their tokens.

1. Decode rows, the next token of every running stream, are always in.
2. The rest of the step is for prompts, running and waiting ones, cut into chunks. ``budget.py`` says how much that
   may cost, so that streams are not held up, ``shares.py`` which task goes next, and within a task the rank does,
   which is priority, waiting time and arrival (``queue.py``): a class never gets another task's share, however high.
3. When blocks run out, what does no work gives way first, then the running sequence of the lowest rank, of any task:
   the youngest of the lowest class, ageing counted.
4. What few streams leave free of a step may hold guesses of their next tokens (``speculation.py``).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping

from pyruntime.scheduler.blocks import BlockPool
from pyruntime.scheduler.budget import StepLimits
from pyruntime.scheduler.cost import DEFAULT_EQUAL_DEPTH, CostModel
from pyruntime.scheduler.load import SchedulerLoad
from pyruntime.scheduler.memory import Memory
from pyruntime.scheduler.places import Places
from pyruntime.scheduler.plan import StepPlan
from pyruntime.scheduler.population import Population
from pyruntime.scheduler.prefix_cache import PrefixCache
from pyruntime.scheduler.prompts import PromptFiller
from pyruntime.scheduler.queue import Ranking
from pyruntime.scheduler.room import Room
from pyruntime.scheduler.sequence import Sequence, State
from pyruntime.scheduler.shares import TaskShares
from pyruntime.scheduler.speculation import Speculation
from pyruntime.types import TASKS, Task


class Scheduler:
    """Owns every live sequence of one model. Used from the step thread only.

    ``blocks`` None: no key/value cache (encoders), sequences run whole.
    ``max_batch_tokens``: most tokens in a step, and most token equivalents of its prompts; a sequence that cannot be
    cut may exceed both, alone. Decode rows may exceed them too.
    ``max_running``: most sequences in the batch, see ``Places``.
    ``max_prompt_tokens_beside``, ``max_pause_factor``, ``step_base_tokens``: bounds beside streams, see ``StepLimits``.
    ``priority_ageing_s``: seconds of waiting worth one priority class, 0: strict classes, see ``Ranking``.
    ``task_shares``: weight of each task, default 1, see ``TaskShares``.
    ``window``: set when every layer has a sliding window; None otherwise, mixed layers included.
    ``equal_cost_depth``: where attention costs as much as the linears, 0: never, see ``CostModel``.
    ``head_cost_depth``: how many keys cost as much as the vocabulary for one row, see there.
    ``speculation``: guesses the next tokens of streams ahead; None: nothing is guessed.
    ``clock``: seconds that never go back.
    """

    def __init__(
        self,
        blocks: BlockPool | None,
        max_batch_tokens: int,
        max_running: int,
        max_prompt_tokens_beside: int = 0,
        prefix_cache: PrefixCache | None = None,
        *,
        max_pause_factor: float = 3.0,
        step_base_tokens: int = 48,
        priority_ageing_s: float = 0.0,
        task_shares: Mapping[Task, float] | None = None,
        window: int | None = None,
        equal_cost_depth: int = DEFAULT_EQUAL_DEPTH,
        head_cost_depth: int = 0,
        speculation: Speculation | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.blocks = blocks
        self.prefix_cache = prefix_cache
        self.max_batch_tokens = max_batch_tokens
        self.max_running = max_running
        costs = CostModel(equal_cost_depth, window, head_cost_depth)
        self.limits = StepLimits(
            max_batch_tokens, max_prompt_tokens_beside or max_batch_tokens, max_pause_factor, step_base_tokens, costs
        )
        self._memory = Memory(blocks, prefix_cache, window, max_batch_tokens)
        self._population = Population(self._memory)
        self._queue = self._population.queue
        self._room = Room(self._population)
        self._places = Places(max_running)
        self._ranking = Ranking(priority_ageing_s)
        self._filler = PromptFiller(self._population, self._room, self._places, TaskShares(task_shares))
        self._speculation = speculation
        self._num_accepted = 0
        self._clock = clock

    # -- state ------------------------------------------------------------------------------------

    @property
    def running(self) -> set[Sequence]:
        return self._population.running

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def has_work(self) -> bool:
        """False when nothing but paused sequences is left."""
        return len(self._queue) > 0 or bool(self.running)

    def load(self) -> SchedulerLoad:
        """A snapshot; takes time in the number of running sequences alone."""
        remaining = Counter[Task]()
        for sequence in self.running:
            remaining[sequence.task] += sequence.num_remaining
        queue, pool = self._queue, self.blocks
        return SchedulerLoad(
            num_waiting={task: queue.num_waiting[task] + queue.num_pending[task] for task in TASKS},
            waiting_tokens={task: queue.tokens[task] for task in TASKS},
            num_running={task: self._population.num_running[task] for task in TASKS},
            running_tokens={task: remaining[task] for task in TASKS},
            num_paused=len(self._population.paused),
            blocks_used=pool.num_used if pool is not None else 0,
            blocks_free=pool.num_free if pool is not None else 0,
            blocks_cached=pool.num_cached if pool is not None else 0,
            num_set_back=self._population.num_set_back,
            num_drafted=self._speculation.num_drafted if self._speculation is not None else 0,
            num_accepted=self._num_accepted,
        )

    # -- entering and leaving ---------------------------------------------------------------------

    def add(self, sequences: list[Sequence]) -> None:
        """Queue one request's sequences; those with a parent wait until its prompt is computed."""
        self._ranking.assign(sequences, self._clock())
        for sequence in sequences:
            self._places.expect(sequence.task)
            self._population.add(sequence)

    def append_token(self, sequence: Sequence, token_id: int, was_drafted: bool = False) -> None:
        """A running sequence grows. ``was_drafted``: the step that drew the token has its keys and values already."""
        sequence.token_ids.append(token_id)
        if was_drafted:
            self._num_accepted += 1
            self._population.step_over(sequence, 1)

    def finish(self, sequence: Sequence) -> None:
        """The sequence is done or cancelled, in whatever state: its blocks go back unless children still need them."""
        self._population.finish(sequence)

    def distrust(self, sequence: Sequence) -> None:
        """Its result was not finite: if its keys and values are to blame, no later sequence may start from them."""
        self._memory.distrust(sequence)

    def drop(self, sequence: Sequence) -> None:
        """As ``finish``, for a cancelled request: no child will come, so nothing is held."""
        sequence.num_unforked = 0
        sequence.children = []
        self.finish(sequence)

    def pause(self, sequence: Sequence) -> None:
        """Out of the plans until ``resume``. Its blocks stay until others need them; it gives way before any that runs.

        Changes nothing for a sequence that has ended, is held or waits for its parent.
        """
        self._population.pause(sequence)

    def resume(self, sequence: Sequence) -> None:
        """A paused sequence goes on where it was; at once, though ``max_running`` others may run. Others: no change."""
        self._population.resume(sequence)

    def reset(self, sequence: Sequence) -> None:
        """A running sequence gives its blocks up and queues again, to be computed anew from its first token."""
        self._population.set_back(sequence)

    # -- the step ---------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """The next step; an empty plan means that nothing can run."""
        plan = StepPlan()
        for sequence in sorted(s for s in self.running if s.is_decoding):
            if sequence.state is State.RUNNING and self._room.reserve(sequence, 1, plan):
                plan.add(sequence, 1, self.limits.costs.cost(1, sequence.num_computed))
        self._filler.fill(plan, self.limits.for_prompts(plan))
        if self._speculation is not None:
            # Free blocks for one more of every sequence stay, so that nobody has to give way for a guess.
            most, spare = self.max_batch_tokens - plan.num_tokens, len(self.running)
            self._speculation.extend(plan, self._population.memory, most, spare)
        return plan

    def advance(self, plan: StepPlan) -> None:
        """The step ran: its tokens have keys and values now, and finished prompts release their children."""
        for sequence, num_tokens in plan.entries:
            if sequence.state is State.RUNNING:
                self._population.step_over(sequence, num_tokens)
