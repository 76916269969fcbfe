"""The blocks of sequences: reserved ahead of a step, shared and copied at a fork, given back.

Knows nothing of the policy: who has to give way when blocks run out is decided in ``room.py``.
"""

from __future__ import annotations

from pyruntime.scheduler.blocks import BlockPool
from pyruntime.scheduler.plan import StepPlan
from pyruntime.scheduler.prefix_cache import PrefixCache
from pyruntime.scheduler.sequence import Sequence
from pyruntime.scheduler.sharing import Shared, shared_by
from pyruntime.scheduler.window import KEYS_A_TILE, first_read


class Memory:
    """``pool`` None: the model has no key/value cache, and everything fits.

    ``window``: of a model whose every layer has one; blocks that fell out of it go back while the sequence runs.
    ``max_chunk``: most tokens of one sequence in a step.
    """

    def __init__(self, pool: BlockPool | None, cache: PrefixCache | None, window: int | None, max_chunk: int) -> None:
        if window is not None and window < 2:  # so the key before a token's own is always kept, and a block with it
            raise ValueError(f"window: {window}; allowed: at least 2")
        self.pool = pool
        self.cache = cache
        self._window = window
        self._max_chunk = max_chunk
        self._copy_sources: dict[Sequence, int] = {}

    def shared_by(self, sequence: Sequence) -> Shared:
        return shared_by(sequence, self.pool, self.cache, self._window)

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks if self.pool is not None else 0

    def num_needed(self, sequence: Sequence, shared: Shared) -> int:
        """Blocks that must be free for the sequence to start, its whole prompt counted."""
        if self.pool is None:
            return 0
        own = self.pool.blocks_for(len(sequence)) - shared.num_places
        if self._window is not None:
            at_once = self._window + KEYS_A_TILE + self._max_chunk
            own = min(own, self.pool.blocks_for(at_once) + 1, self.pool.num_blocks)
        # Blocks that an earlier request left count as free until they are shared.
        return own + self.pool.num_idle(shared.blocks)

    def num_missing(self, sequence: Sequence, shared: Shared) -> int:
        """Blocks that are not free of those that a start needs; 0 or less: it fits."""
        return self.num_needed(sequence, shared) - self.num_free

    @property
    def num_free(self) -> int:
        return self.pool.num_free if self.pool is not None else 0

    def num_wanted(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks that the next ``num_tokens`` of a running sequence take."""
        if self.pool is None:
            return 0
        return max(self.pool.blocks_for(sequence.num_computed + num_tokens) - len(sequence.blocks), 0)

    def reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        """Blocks for the next ``num_tokens`` of a running sequence; False (and nothing taken) when too few are free."""
        if self.pool is None:
            return True
        wanted = self.num_wanted(sequence, num_tokens)
        if wanted > self.pool.num_free:
            return False
        if wanted:
            sequence.blocks += self.pool.allocate(wanted)
        return True

    def reserve_ahead(self, sequence: Sequence, num_tokens: int, spare: int) -> int:
        """Blocks for up to ``num_tokens`` behind the next one, if ``spare`` others stay free; returns for how many."""
        if self.pool is None:
            return num_tokens
        size, begin = self.pool.block_size, sequence.num_computed + 1
        wanted = min(self.num_wanted(sequence, num_tokens + 1), self.pool.num_free - spare)
        if wanted > 0:
            sequence.blocks += self.pool.allocate(wanted)
        return min(num_tokens, len(sequence.blocks) * size - begin)

    def most_tokens(self, sequence: Sequence) -> int:
        """How many more tokens of a sequence that runs there are blocks for."""
        if self.pool is None:
            return sequence.num_remaining
        return (len(sequence.blocks) + self.pool.num_free) * self.pool.block_size - sequence.num_computed

    def take(self, sequence: Sequence, shared: Shared, plan: StepPlan) -> None:
        """References to the full blocks; a half-filled one is copied before the step's forward, and kept until then."""
        if self.pool is None:
            return
        own = self.pool.share(shared.blocks)
        self.pool.release(self.pool.share(shared.passed))  # used in a way: what follows them is worth nothing alone
        if shared.partial is not None:
            self._copy_sources[sequence] = self.pool.share([shared.partial])[0]
            own += self.pool.allocate(1)
            plan.block_copies.append((shared.partial, own[-1]))
        sequence.blocks = own[:1] * shared.num_passed + own
        sequence.num_passed = shared.num_passed
        sequence.cache_nodes = list(shared.nodes)

    def settle(self, sequence: Sequence) -> None:
        """A step of the sequence is over: its full blocks become known, what its window left behind goes."""
        self._release_copy_source(sequence)
        # A continuation that reads its prompt's hidden rows is as good a prefix for others as any.
        if self.cache is not None and (sequence.reuses_prefix or not sequence.is_prefill_only):
            self.cache.insert(
                sequence.token_ids,
                sequence.cache_nodes,
                sequence.blocks,
                sequence.num_computed,
                sequence.cache_salt,
            )
        if self.pool is not None and self._window is not None:
            self._trim(sequence, self.pool)

    def distrust(self, sequence: Sequence) -> None:
        """What the sequence read and wrote may be wrong: nobody is to find it in the prefix cache."""
        if self.cache is not None:
            self.cache.forget(sequence.token_ids, sequence.cache_nodes, sequence.cache_salt)

    def release(self, sequence: Sequence) -> None:
        """All of the sequence's references go."""
        self._release_copy_source(sequence)
        if self.pool is not None:
            self.pool.release(sequence.own_blocks)
        sequence.blocks = []
        sequence.num_passed = 0

    def _trim(self, sequence: Sequence, pool: BlockPool) -> None:
        position = sequence.num_computed
        if sequence.num_unforked:  # children start behind the prompt, at the earliest from its last token
            position = min(position, sequence.num_prompt - 1)
        first = first_read(position, self._window) // pool.block_size
        if first > sequence.num_passed:
            pool.release(sequence.blocks[sequence.num_passed : first])
            sequence.blocks[:first] = [sequence.blocks[first]] * first
            sequence.num_passed = first

    def _release_copy_source(self, sequence: Sequence) -> None:
        source = self._copy_sources.pop(sequence, None)
        if self.pool is not None and source is not None:
            self.pool.release([source])
