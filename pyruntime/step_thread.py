"""The thread on which a device computes: its engines take turns on it, and everything between their steps is there too.

One thread a device and not one an engine: OpenMP makes a team of threads for each thread that computes, and as soon as
the teams have more threads than there are cores, their members sleep between parallel parts instead of spinning. That
alone made a step of 96 rows twice as long on two cores (docs/performance.md). And no second thread that hands steps to
this one: a hand-over and the way back took a tenth of a millisecond of each step.

For the same reason a turn that is over before such a hand-over pays may be taken by another thread while this one has
nothing to do (``try_turn``). That makes no second team: what is so short has no part that torch divides, and compiled
kernels share a team of their own (``csrc/cpu/team.h``).
"""

from __future__ import annotations

import functools
import logging
import threading
from typing import Protocol

log = logging.getLogger(__name__)

# What the last turn of a member gives back.
ENDED = -1.0


class Member(Protocol):
    def turn(self) -> float | None:
        """Do what there is to do, one step at most. A member that raises has no more turns.

        Gives seconds after which it wants another turn, None to have none before ``wake``, or ``ENDED``.
        """
        ...


class StepThread:
    """Members have their turns one after the other, so that a busy one goes behind those that wait.

    The thread ends with its last member, and with it the OpenMP threads that computed for it; the next member has a
    new one. Every method may be called from any thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._condition = threading.Condition()
        self._is_woken = False
        self._is_quiet = False  # the thread waits, and nobody has woken it up to now
        self._is_lent = False  # another thread has a turn
        self._members: list[Member] = []
        self._thread: threading.Thread | None = None

    def add(self, member: Member) -> None:
        """Its first turn follows at once."""
        with self._condition:
            self._members.append(member)
            if self._thread is None:
                # A daemon: a device that hangs must not hold up the end of the process.
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._wake()

    def wake(self) -> None:
        """Some member has something to do: all have a turn that begins after this."""
        with self._condition:
            self._wake()

    def try_turn(self, member: Member) -> bool:
        """A turn of ``member``, which this thread has, on the calling thread; False where that would not be at once.

        It is given only while the thread waits for something to do, which then waits for the end of that turn as well.
        """
        with self._condition:
            if self._is_woken or self._is_lent or not self._is_quiet:
                return False
            self._is_lent = True
        seconds = _turn_of(member)
        with self._condition:
            self._is_lent = False
            if seconds == ENDED:
                self._members.remove(member)
            if seconds is not None:  # the thread finds out itself who wants a turn when
                self._wake()
            elif not self._is_quiet:
                self._condition.notify_all()
        return True

    def wait_for_end(self, member: Member) -> None:
        """Until ``member``, of this thread once, has had its last turn."""
        with self._condition:
            self._condition.wait_for(lambda: member not in self._members)

    def _wake(self) -> None:
        self._is_woken = True
        self._condition.notify_all()

    def _run(self) -> None:
        seconds: float | None = 0.0
        while self._wait(seconds):
            seconds = self._give_turns()  # a call of its own, so that nothing of a member outlives it

    def _wait(self, seconds: float | None) -> bool:
        """Until some member wants a turn; False when there is none any more."""
        with self._condition:
            if not self._members:
                self._thread = None
                return False
            if not self._is_woken and seconds != 0:
                self._is_quiet = True
                self._condition.wait(seconds)
                self._is_quiet = False
                self._condition.wait_for(lambda: not self._is_lent)
            self._is_woken = False
            return True

    def _give_turns(self) -> float | None:
        """One to each. Seconds until the first of them wants another."""
        soonest: float | None = None
        for member in tuple(self._members):
            seconds = _turn_of(member)
            if seconds == ENDED:
                with self._condition:
                    self._members.remove(member)
                    self._condition.notify_all()
            elif seconds is not None:
                soonest = seconds if soonest is None else min(soonest, seconds)
        return soonest


def _turn_of(member: Member) -> float | None:
    try:
        return member.turn()
    except BaseException:  # the others are not to blame
        log.critical("a member of a step thread failed", exc_info=True)
        return ENDED


@functools.cache
def device_thread(device: str) -> StepThread:
    """The one that all engines of a device share."""
    return StepThread(f"device-{device}")
