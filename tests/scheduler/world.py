"""A scheduler with a cache that remembers what was written, driven step by step and checked after each."""

from collections import Counter

from pyruntime.scheduler.blocks import BlockPool
from pyruntime.scheduler.prefix_cache import PrefixCache
from pyruntime.scheduler.scheduler import Scheduler
from pyruntime.scheduler.sequence import Sequence, State
from pyruntime.scheduler.window import first_read
from pyruntime.types import Task


def sevens(token_ids):
    return 7


class World:
    """Every key written is the hash of all tokens up to it, so a read shows whether it is the sequence's own.

    ``draw``: the next token of a stream, as a function of all before it.
    """

    def __init__(
        self, num_blocks=16, block_size=4, budget=16, max_running=6, cached=True, window=None, draw=sevens, **options
    ):
        self.now = 0.0
        self.pool = BlockPool(num_blocks, block_size)
        cache = PrefixCache(self.pool) if cached else None
        self.scheduler = Scheduler(
            self.pool, budget, max_running, prefix_cache=cache, window=window, clock=lambda: self.now, **options
        )
        self.window = window
        self.draw = draw
        self.max_running = max_running
        self.written: dict[tuple[int, int], int] = {}
        self.new_tokens: dict[Sequence, int] = {}
        self.live: dict[Sequence, None] = {}
        self.ended = Counter()
        self.order: list[Sequence] = []  # as they started first

    # -- requests ---------------------------------------------------------------------------------

    def generate(self, tokens, new_tokens=2, n=1, drafts=True, **fields):
        fields["draft_limit"] = (len(tokens) + new_tokens) * drafts
        first = Sequence(Task.GENERATE, list(tokens), **fields)
        others = [Sequence(Task.GENERATE, list(tokens), index=i, parent=first, **fields) for i in range(1, n)]
        return self._add([first, *others], new_tokens)

    def items(self, prefix, items, task=Task.SCORE, **fields):
        parent = Sequence(task, list(prefix), index=-1, is_prefix=True, **fields)
        own = [Sequence(task, [*prefix, *item], index=i, parent=parent, **fields) for i, item in enumerate(items)]
        return self._add([parent, *own])

    def embed(self, tokens, **fields):
        return self._add([Sequence(Task.EMBED, list(tokens), **fields)])

    def _add(self, sequences, new_tokens=0):
        for sequence in sequences:
            self.live[sequence] = None
            self.new_tokens[sequence] = new_tokens
        self.scheduler.add(sequences)
        self.check()
        return sequences

    def cancel(self, sequences):
        for sequence in sequences:
            self.scheduler.drop(sequence)
        for sequence in sequences:
            if self.live.pop(sequence, 0) is None:
                self.ended[sequence] += 1
        self.check()

    # -- steps ------------------------------------------------------------------------------------

    def step(self):
        """One step, run whole; returns its plan."""
        plan = self.plan()
        self.run(plan)
        return plan

    def plan(self):
        streams = [s for s in self.scheduler.running if s.is_decoding]
        plan = self.scheduler.schedule()
        self._check_plan(plan, streams)
        self.now += 0.01
        return plan

    def run(self, plan):
        """The entries of a plan, or of a part of it, that still run."""
        plan.entries = [(sequence, count) for sequence, count in plan.entries if sequence.state is State.RUNNING]
        for source, target in plan.block_copies:
            for offset in range(self.pool.block_size):
                self.written[target, offset] = self.written.get((source, offset), 0)
        for sequence, count in plan.entries:
            self._forward(sequence, count, plan.drafts.get(sequence, []))
        reading = [s for s, n in plan.entries if s.num_computed + n == len(s) and not s.is_prefix]
        for sequence, _ in plan.entries:
            if sequence not in self.order:
                self.order.append(sequence)
        self.scheduler.advance(plan)
        for sequence in reading:
            self._read(sequence, plan.drafts.get(sequence, []))
        self.check()

    def drain(self, most_steps=20_000):
        """Everything runs to its end, the paused too."""
        for sequence in list(self.live):
            self.scheduler.resume(sequence)
        while self.scheduler.has_work:
            self.step()
            most_steps -= 1
            assert most_steps, "work is left that never ends"
        self.check()
        left = [s for s in self.live if not s.is_prefix]
        assert not left
        assert all(s.state is State.FINISHED for s in self.live)
        assert set(self.ended.values()) <= {1}
        assert self.pool.num_used == 0
        load = self.scheduler.load()
        assert not any(sum(numbers.values()) for numbers in (load.num_waiting, load.waiting_tokens, load.num_running))

    def _forward(self, sequence, count, drafts):
        """Read what the window shows, write the keys of the new tokens, of drafts too."""
        size, begin, end = self.pool.block_size, sequence.num_computed, sequence.num_computed + count
        known = 0
        for position, token in enumerate([*sequence.token_ids[:end], *drafts]):
            known = hash((known, token, sequence.cache_salt))
            block = sequence.blocks[position // size]
            if position >= begin:
                self.written[block, position % size] = known
            elif position >= first_read(begin, self.window):
                assert self.written[block, position % size] == known

    def _read(self, sequence, drafts):
        if sequence.task is Task.GENERATE:
            self._draw(sequence, drafts)
            if sequence.num_generated < self.new_tokens[sequence]:
                assert sequence.num_remaining == 1
                return
            assert list(sequence.token_ids) == self._alone(sequence)
        self.scheduler.finish(sequence)
        del self.live[sequence]
        self.ended[sequence] += 1

    def _draw(self, sequence, drafts):
        """The token after what is known, and one more for each draft that was right."""
        for draft in [*drafts, None]:
            token = self.draw(sequence.token_ids)
            self.scheduler.append_token(sequence, token, was_drafted=token == draft)
            if token != draft or sequence.num_generated == self.new_tokens[sequence]:
                return

    def _alone(self, sequence):
        """What the sequence must be at its end."""
        tokens = list(sequence.token_ids[: sequence.num_prompt])
        while len(tokens) < sequence.num_prompt + self.new_tokens[sequence]:
            tokens.append(self.draw(tokens))
        return tokens

    # -- what holds at any time -------------------------------------------------------------------

    def _check_plan(self, plan, streams):
        scheduler, limits = self.scheduler, self.scheduler.limits
        assert plan.entries or not scheduler.has_work
        sequences = [s for s, _ in plan.entries]
        assert len(set(sequences)) == len(sequences)
        assert all(s in sequences or s.state is State.WAITING for s in streams), "a stream was left out"
        assert all(s.state is State.RUNNING for s in sequences)
        decode = [s for s, _ in plan.entries if s in streams]
        prompts = [(s, n) for s, n in plan.entries if s not in streams]
        assert plan.num_tokens <= max(scheduler.max_batch_tokens, len(decode))
        self._check_drafts(plan)
        assert all(len(s.blocks) * self.pool.block_size >= s.num_computed + n <= len(s) for s, n in plan.entries)
        cost = sum(limits.costs.cost(n, s.num_computed) for s, n in prompts)
        decode_cost = sum(limits.costs.cost(1, s.num_computed) for s in decode)
        most = scheduler.max_batch_tokens - len(decode)
        if decode:
            pause = (limits.pause_factor - 1) * (limits.base_tokens + decode_cost)
            most = min(most, limits.max_beside, pause if limits.pause_factor else most)
        assert cost <= most or sum(n for _, n in prompts) == 1
        assert len(scheduler.running) <= self.max_running + len(Task) - 1

    def _check_drafts(self, plan):
        assert plan.num_tokens == sum(n for _, n in plan.entries) + sum(map(len, plan.drafts.values()))
        assert all((s, 1) in plan.entries and s.is_decoding for s in plan.drafts)
        rows = sum(s.is_decoding for s, _ in plan.entries) + sum(map(len, plan.drafts.values()))
        assert not plan.drafts or rows <= self.scheduler._speculation._max_rows
        for sequence, drafts in plan.drafts.items():
            length = sequence.num_computed + 1 + len(drafts)
            assert 0 < len(drafts) < sequence.draft_limit - len(sequence)
            assert len(sequence.blocks) * self.pool.block_size >= length

    def check(self):
        """Blocks are referenced by those who list them and by nobody else; states and counts agree."""
        pool, load = self.pool, self.scheduler.load()
        sources = self.scheduler._memory._copy_sources
        held = Counter(block for s in self._all() for block in s.own_blocks)
        held.update(sources.values())
        assert [held[block] for block in range(pool.num_blocks)] == pool._references
        free = [*pool._free, *pool._idle]
        assert len(free) == len(set(free)) == pool.num_free == pool.num_blocks - len(held)
        assert not set(free) & set(held)
        states = Counter(s.state for s in self._all())
        assert sum(load.num_waiting.values()) == states[State.WAITING] + states[State.PENDING]
        assert sum(load.num_running.values()) == states[State.RUNNING] == len(self.scheduler.running)
        assert load.num_paused == states[State.PAUSED]
        for sequence in self._all():
            if sequence.state in (State.PENDING, State.WAITING, State.FINISHED):
                assert not sequence.blocks
        assert self.scheduler.has_work == bool(states[State.WAITING] or states[State.RUNNING])

    def _all(self):
        """Live sequences, and those that a finished request left behind for their children."""
        return list({**self.live, **dict.fromkeys(self.ended)})
