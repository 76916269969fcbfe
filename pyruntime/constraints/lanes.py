"""Threads that compile, with a process each that goes ahead, and a bound on how long others wait for them."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pyruntime.constraints.guard import Guard, TookTooLong, TookTooMuch
from pyruntime.errors import Overloaded, RequestCancelled

T = TypeVar("T")

MAX_WAIT_S = 10.0
_AVERAGED_OVER = 16  # jobs


@dataclass(frozen=True, slots=True)
class Verdict:
    """``grammar`` to compile, or the ``problem`` with it; neither when it ``took_too_long`` or ``was_stopped``.

    ``compile_s``: the processor time that compiling the grammar took.
    """

    grammar: str = ""
    compile_s: float = 0.0
    problem: str = ""
    took_too_long: bool = False
    was_stopped: bool = False


@dataclass
class _Asked:
    """A text that is being checked, once for all who wait for it."""

    answer: Future[Verdict] = field(default_factory=Future)
    num_waiting: int = 0
    guard: Guard | None = None


class Lane:
    """``num_threads`` that each take one job after another.

    ``guard`` makes a thread's process. ``expected_s``: what a job takes, until some have been seen.
    Raises ``Overloaded`` for a job that would wait for more than ``MAX_WAIT_S``, and for one that has.
    """

    def __init__(self, name: str, num_threads: int, guard: Callable[[], Guard], expected_s: float) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=f"constrain-{name}")
        self._num_threads = num_threads
        self._guards: queue.SimpleQueue[Guard] = queue.SimpleQueue()
        for _ in range(num_threads):
            self._guards.put(guard())
        self._lock = threading.Lock()
        self._asked: dict[Hashable, _Asked] = {}
        self._num_jobs = 0
        self._average_s = expected_s
        self._is_closed = False

    @property
    def num_jobs(self) -> int:
        """Jobs that run or wait."""
        return self._num_jobs

    async def run(self, job: Callable[..., T], *arguments: Any) -> T:
        """The job's result. A job whose caller is cancelled before it has begun is left out."""
        return await asyncio.wrap_future(self._submit(job, *arguments))

    async def check(self, key: Hashable, question: dict[str, Any]) -> Verdict:
        """What the process says of a question, asked once for all callers with the same ``key``.

        When all of them are cancelled, the process is ended with what it is at. Raises ``RequestCancelled`` when the
        lane is closed meanwhile.
        """
        with self._lock:
            asked = self._asked.get(key)
        if asked is None:
            asked = _Asked()
            asked.answer = self._submit(self._check, asked, question)
            with self._lock:
                asked = self._asked.setdefault(key, asked)
        asked.num_waiting += 1
        try:
            verdict = await asyncio.shield(asyncio.wrap_future(asked.answer))
        finally:
            asked.num_waiting -= 1
            if not asked.num_waiting:
                self._forget(key, asked)
        if verdict.was_stopped:
            raise RequestCancelled("the server ends, and what it was compiling with it")
        return verdict

    def close(self) -> None:
        """Nothing more is done; what runs ends with its process."""
        with self._lock:
            self._is_closed = True
            running = list(self._asked.values())
        self._pool.shutdown(wait=False, cancel_futures=True)
        for asked in running:
            self._stop(asked)
        with contextlib.suppress(queue.Empty):
            while True:
                self._guards.get_nowait().close()

    def _submit(self, job: Callable[..., T], *arguments: Any) -> Future[T]:
        with self._lock:
            wait_s = self._num_jobs / self._num_threads * self._average_s
            if wait_s > MAX_WAIT_S:
                raise Overloaded(f"{self._num_jobs} constraints are being compiled or wait for it", wait_s)
            self._num_jobs += 1
        future = self._pool.submit(self._timed, time.monotonic(), job, *arguments)
        future.add_done_callback(self._done)
        return future

    def _done(self, _: Future[Any]) -> None:
        with self._lock:
            self._num_jobs -= 1

    def _timed(self, submitted: float, job: Callable[..., T], *arguments: Any) -> T:
        start = time.monotonic()
        if start - submitted > MAX_WAIT_S:  # those before it took longer than was to be expected
            raise Overloaded(f"constraints waited for {MAX_WAIT_S:g} s to be compiled", MAX_WAIT_S)
        try:
            return job(*arguments)
        finally:
            self._average_s += (time.monotonic() - start - self._average_s) / _AVERAGED_OVER

    def _check(self, asked: _Asked, question: dict[str, Any]) -> Verdict:
        guard = self._guards.get()
        with self._lock:
            asked.guard = guard
        try:
            answer = guard.ask(question)
            return Verdict(**answer)
        except RequestCancelled:
            return Verdict(was_stopped=True)
        except TookTooLong:
            return Verdict(took_too_long=True)
        except TookTooMuch:
            limit = f"{guard.memory_bytes >> 20} MiB of memory"
            return Verdict(problem=f"takes more than {limit}, or too deep a stack, to compile")
        finally:
            with self._lock:
                asked.guard = None
                is_closed = self._is_closed
            if is_closed:
                guard.close()
            self._guards.put(guard)

    def _forget(self, key: Hashable, asked: _Asked) -> None:
        with self._lock:
            if self._asked.get(key) is asked:
                del self._asked[key]
        if not asked.answer.done():
            self._stop(asked)

    def _stop(self, asked: _Asked) -> None:
        asked.answer.cancel()
        with self._lock:
            if asked.guard is not None:
                asked.guard.stop()
