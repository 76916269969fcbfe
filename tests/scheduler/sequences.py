"""Sequences and schedulers for the tests of this folder."""

from pyruntime.scheduler.blocks import BlockPool
from pyruntime.scheduler.prefix_cache import PrefixCache
from pyruntime.scheduler.scheduler import Scheduler
from pyruntime.scheduler.sequence import Sequence
from pyruntime.types import Task


def prompt(length, task=Task.GENERATE, **fields):
    return Sequence(task, list(range(length)), **fields)


def make(num_blocks=64, block_size=4, budget=32, max_running=16, cached=False):
    pool = BlockPool(num_blocks, block_size)
    return Scheduler(pool, budget, max_running, prefix_cache=PrefixCache(pool) if cached else None)


def planned(plan):
    return [(sequence, count) for sequence, count in plan.entries]
