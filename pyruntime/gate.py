"""Where the steps of a device run: on one thread, in the order in which its engines ask."""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Gate(Protocol):
    """Runs a step's work when its turn has come, and gives back what it returns or raises what it raises."""

    def run(self, work: Callable[[], T]) -> T: ...


class Inline:
    """For an engine that has its device to itself: the work runs where it is asked for."""

    def run(self, work: Callable[[], T]) -> T:
        return work()


class DeviceThread:
    """First come, first served, whichever thread asks: a busy engine goes behind those that wait.

    One thread and not a lock: OpenMP makes a team of threads for each thread that computes, and as soon as the teams
    have more threads than there are cores, their members sleep between parallel parts instead of spinning. That alone
    made a step of 96 rows twice as long on two cores (docs/performance.md).
    """

    def __init__(self, name: str) -> None:
        self._asked: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        # A daemon: a device that hangs must not hold up the end of the process.
        threading.Thread(target=self._run, name=f"device-{name}", daemon=True).start()

    def run(self, work: Callable[[], T]) -> T:
        answer: Future[T] = Future()
        self._asked.put((work, answer))
        return answer.result()

    def _run(self) -> None:
        while True:
            self._run_one(*self._asked.get())  # a call of its own, so that nothing of a step outlives it

    @staticmethod
    def _run_one(work: Callable[[], Any], answer: Future[Any]) -> None:
        try:
            answer.set_result(work())
        except BaseException as error:  # whoever asked decides what it means
            answer.set_exception(error)


@functools.cache
def device_gate(device: str) -> DeviceThread:
    """The gate that all engines of one device share."""
    return DeviceThread(device)
