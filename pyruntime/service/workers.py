"""A few threads for what would hold the event loop up: tokenising, chat templates, long lists of token ids."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

# Below this many bytes tokenising takes less time than handing the work to a thread.
INLINE_BYTES = 1024
# The most text that one job tokenises, a single longer text apart: about a tenth of a second.
SLICE_BYTES = 256 * 1024


class TextWorkers:
    """Threads that tokenise. The tokenizers' own code releases the interpreter lock while it works.

    Jobs run in the order in which they come. A request hands its slices in one after the other, so those of several
    requests take turns, and one whose call has ended hands in no more: cancelling the task that awaits ``run`` also
    takes a job back that no thread has begun.
    """

    def __init__(self, num_threads: int = 4) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenize")

    async def run(self, num_bytes: int, function: Callable[..., T], *args: Any) -> T:
        """``function(*args)`` on a worker; at once when it has few bytes to read."""
        if num_bytes <= INLINE_BYTES:
            return function(*args)
        return await self.run_aside(function, *args)

    async def run_aside(self, function: Callable[..., T], *args: Any) -> T:
        """``function(*args)`` on a worker, however little there is to read."""
        in_call = contextvars.copy_context().run  # what it logs belongs to the call
        return await asyncio.get_running_loop().run_in_executor(self._pool, in_call, function, *args)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def slices(sizes: Sequence[int], most: int = SLICE_BYTES) -> Iterator[range]:
    """Consecutive places, from the first to the last, whose sizes sum to at most ``most``; a larger one is alone."""
    start, total = 0, 0
    for place, size in enumerate(sizes):
        if place > start and total + size > most:
            yield range(start, place)
            start, total = place, 0
        total += size
    if start < len(sizes):
        yield range(start, len(sizes))
