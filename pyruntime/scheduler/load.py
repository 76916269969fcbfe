"""How busy a scheduler is, for admission and telemetry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pyruntime.types import Task


@dataclass(frozen=True, slots=True)
class SchedulerLoad:
    """A snapshot between two steps. Every mapping has every task.

    ``num_waiting``/``waiting_tokens``: sequences that are queued or wait for their parent's prompt, and the tokens
    that are to be computed for them, prefixes that the cache may spare included. ``num_running``/``running_tokens``:
    sequences in the batch and their known tokens yet to be computed (a stream has one). ``num_paused``: neither.
    Blocks: ``used`` + ``free`` is the whole pool; ``cached`` are those of the free that earlier prompts left in the
    prefix cache. All 0 without a key/value cache. Since the start: ``num_set_back`` times a sequence gave its blocks up
    to be computed anew later, ``num_drafted`` tokens were guessed ahead, of which ``num_accepted`` were right.
    """

    num_waiting: Mapping[Task, int]
    waiting_tokens: Mapping[Task, int]
    num_running: Mapping[Task, int]
    running_tokens: Mapping[Task, int]
    num_paused: int
    blocks_used: int
    blocks_free: int
    blocks_cached: int
    num_set_back: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
