"""One sequence: the unit of scheduling, whatever reads its hidden rows in the end."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from pyruntime.types import Task


class State(enum.Enum):
    """PENDING waits for its parent, WAITING is queued, RUNNING is in the batch, HOLDING keeps blocks for children."""

    PENDING = "pending"
    WAITING = "waiting"
    RUNNING = "running"
    HOLDING = "holding"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens, how many of them have keys and values, and the blocks these lie in.

    ``parent``: the sequence whose computed prefix this one starts from (``n`` continuations of one
    prompt, items behind one query). ``is_prefix``: it exists for its children alone and no head reads it.
    ``reuses_prefix``: hidden rows of tokens computed earlier are not needed, so cached ones may be taken.
    ``payload``: what the task's head needs (sampling, pooling or label parameters), opaque here.
    """

    task: Task
    token_ids: list[int]
    payload: Any = None
    index: int = 0
    priority: int = 0
    is_prefix: bool = False
    parent: Sequence | None = None
    token_type_ids: list[int] | None = None
    reuses_prefix: bool = True
    owner: Any = None

    state: State = State.PENDING
    arrival: int = 0
    num_prompt: int = 0
    num_computed: int = 0
    cached_tokens: int = 0
    blocks: list[int] = field(default_factory=list)
    cache_nodes: list[int] = field(default_factory=list)
    children: list[Sequence] = field(default_factory=list)
    num_unforked: int = 0
    first_run_at: float | None = None
    partial_hidden: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_prompt = len(self.token_ids)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def key(self) -> tuple[int, int, int]:
        """Smallest goes first: higher priority, then earlier arrival, then order within the request."""
        return (-self.priority, self.arrival, self.index)

    def __lt__(self, other: Sequence) -> bool:
        return self.key < other.key

    @property
    def num_remaining(self) -> int:
        """Tokens whose keys and values are not computed yet."""
        return len(self.token_ids) - self.num_computed

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
