"""One sequence: the unit of scheduling, whatever reads its hidden rows in the end."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from pyruntime.scheduler.drafter import Drafter
from pyruntime.scheduler.tokens import SharedTokens
from pyruntime.types import Task

# Smallest goes first; ``Ranking`` in queue.py says how it comes about.
Rank = tuple[int, float, int, int]


class State(enum.Enum):
    """PENDING waits for its parent, WAITING is queued, RUNNING is in the batch, HOLDING keeps blocks for children.

    PAUSED is out of the batch until it is resumed, with its blocks unless these were needed.
    """

    PENDING = "pending"
    WAITING = "waiting"
    RUNNING = "running"
    PAUSED = "paused"
    HOLDING = "holding"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens, how many of them have keys and values, and the blocks these lie in.

    ``token_ids``: grow with what is generated. ``SharedTokens`` where many sequences begin with one long prefix.
    ``parent``: the sequence whose computed prefix this one starts from (``n`` continuations of one
    prompt, items behind one query). ``is_prefix``: it exists for its children alone and no head reads it.
    ``reuses_prefix``: hidden rows of tokens computed earlier are not needed, so cached ones may be taken.
    ``cache_salt``: of the adapter or model variant that computes it; prefixes of different salts never match.
    ``row_reads``: how often its head reads the whole vocabulary for each row of its prompt.
    ``payload``: what the task's head needs (sampling, pooling or label parameters), opaque here.
    ``is_followed``: it is paused until its matcher has moved, which happens on another thread.
    ``draft_limit``: how long it may get, if its next tokens may be guessed ahead (``speculation.py``); 0: none are.
    ``matcher``: of a constrained continuation, what may come next; it moves with the tokens. Opaque here, but for
    guesses, which it has to allow.
    """

    task: Task
    token_ids: list[int] | SharedTokens
    payload: Any = None
    index: int = 0
    priority: int = 0
    is_prefix: bool = False
    parent: Sequence | None = None
    token_type_ids: list[int] | None = None
    reuses_prefix: bool = True
    row_reads: int = 0
    cache_salt: str | bytes = ""
    owner: Any = None
    matcher: Any = None
    is_followed: bool = False
    draft_limit: int = 0

    state: State = State.PENDING
    arrival: int = 0
    rank: Rank = (0, 0.0, 0, 0)
    ticket: int = 0  # of its entry in the queue's order; 0: it has none
    queued_tokens: int = 0  # what the queue counts for it
    joins_groups: bool = True  # it may wait for another sequence to compute their common prefix
    num_prompt: int = 0
    num_computed: int = 0
    cached_tokens: int = 0  # of its prompt, found computed when it started first
    num_starts: int = 0
    # The block table. Its first ``num_passed`` places are of blocks that the window left behind and that went back:
    # they repeat the first one that is still its own, so that every entry is valid wherever it is looked at.
    blocks: list[int] = field(default_factory=list)
    num_passed: int = 0
    cache_nodes: list[int] = field(default_factory=list)
    children: list[Sequence] = field(default_factory=list)
    num_unforked: int = 0
    first_run_at: float | None = None
    partial_hidden: list[Any] = field(default_factory=list)
    drafter: Drafter | None = None  # made with the first chance to guess

    def __post_init__(self) -> None:
        self.num_prompt = len(self.token_ids)

    def __len__(self) -> int:
        return len(self.token_ids)

    def __lt__(self, other: Sequence) -> bool:
        return self.rank < other.rank

    @property
    def num_remaining(self) -> int:
        """Tokens whose keys and values are not computed yet."""
        return len(self.token_ids) - self.num_computed

    @property
    def own_blocks(self) -> list[int]:
        """The blocks that it has references to, in order."""
        return self.blocks[self.num_passed :]

    @property
    def num_own_tokens(self) -> int:
        """Tokens still to compute that its parent does not compute for it; at least 1."""
        shared = self.num_computed if self.parent is None else self.parent.num_prompt
        return max(len(self.token_ids) - shared, 1)

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def is_decoding(self) -> bool:
        """One generated token is all that is missing."""
        return self.num_generated > 0 and self.num_remaining == 1

    @property
    def is_prefill_only(self) -> bool:
        return self.task is not Task.GENERATE
