"""More calls than a model can do, at simulated time: who is refused, and how late the others are."""

from __future__ import annotations

import heapq
import random
from collections import Counter, deque
from dataclasses import dataclass

import pytest

from pyruntime.admission import LEAST_STANDING_S, SHARE_STANDING, Admission, Ticket
from pyruntime.errors import DeadlinePassed, Overloaded
from pyruntime.overload import BURST_S, CALM_S, Standing
from pyruntime.types import Task

TOKENS_PER_S, STEP_TOKENS = 20_000.0, 1000
#: In the mean, of a call's exponential length.
CALL_TOKENS = 200


@dataclass
class Call:
    at: float
    left: int
    ticket: Ticket
    wait: float = 0.0


class Server:
    """Steps of ``STEP_TOKENS`` at most, first come, first served, that take as long as their tokens do."""

    def __init__(self, max_time_s: float = 0.0) -> None:
        self.now = 0.0
        self.admission = Admission("m", 10**6, 10**9, max_time_s, clock=lambda: self.now)
        self.queue = deque[Call]()
        self.done, self.refused, self.retry_after = list[Call](), Counter[type](), list[float]()

    def run(self, arrivals: list[tuple[float, int]], deadline_s: float | None) -> None:
        """Calls of so many tokens; each has ``deadline_s``."""
        heapq.heapify(arrivals)
        while arrivals or self.queue:
            if not self.queue:
                self.now = max(self.now, arrivals[0][0])
            while arrivals and arrivals[0][0] <= self.now:
                self._arrive(*heapq.heappop(arrivals), deadline_s)
            if self.queue:
                self._step()

    def _arrive(self, at: float, num_tokens: int, deadline_s: float | None) -> None:
        deadline = None if deadline_s is None else at + deadline_s
        try:
            ticket = self.admission.admit(Task.EMBED, num_ids=num_tokens, deadline=deadline)
            self.admission.enter(ticket, num_tokens)
        except (DeadlinePassed, Overloaded) as error:
            self.refused[type(error)] += 1
            if isinstance(error, Overloaded):
                self.retry_after.append(error.retry_after_s)
        else:
            self.queue.append(Call(at, num_tokens, ticket))

    def _step(self) -> None:
        waiting, room = self.admission.num_known_tokens, STEP_TOKENS
        ended = list[Call]()
        while self.queue and room:
            taken = min(room, self.queue[0].left)
            room -= taken
            self.queue[0].left -= taken
            if not self.queue[0].left:
                ended.append(self.queue.popleft())
        seconds = (STEP_TOKENS - room) / TOKENS_PER_S
        self.now += seconds
        self.admission.leave((Task.EMBED, 0), STEP_TOKENS - room)
        self.admission.note(STEP_TOKENS - room, len(ended), seconds, left_some=waiting > STEP_TOKENS - room)
        for call in ended:
            call.ticket.release()
            call.wait = self.now - call.at
            self.done.append(call)


def poisson(load: float, seconds: float, seed: int = 0) -> list[tuple[float, int]]:
    """``load``: in parts of what the server can do."""
    source, at, found = random.Random(seed), 0.0, list[tuple[float, int]]()
    while (at := at + source.expovariate(load * TOKENS_PER_S / CALL_TOKENS)) < seconds:
        found.append((at, 1 + round(source.expovariate(1 / CALL_TOKENS))))
    return found


@pytest.mark.parametrize("load", [1.1, 1.3, 2.0, 4.0])
def test_past_its_limit_a_server_refuses_some_and_is_in_time_for_the_rest(load):
    server = Server()
    arrivals = poisson(load, 30.0)
    server.run(list(arrivals), deadline_s=2.0)
    settled = [call for call in server.done if call.at > 5.0]
    timely = [call for call in settled if call.wait < 0.5]
    assert len(timely) > 0.95 * len(settled)
    assert sum(call.wait < 0.5 for call in server.done) * CALL_TOKENS / 30.0 > 0.75 * TOKENS_PER_S
    assert server.refused[Overloaded] > 5 * server.refused[DeadlinePassed]
    assert all(LEAST_STANDING_S / 4 < wait < 2.0 for wait in server.retry_after)
    assert server.admission.num_open == server.admission.num_queued_tokens == 0


def test_below_its_limit_it_refuses_nobody():
    server = Server()
    server.run(poisson(0.85, 60.0), deadline_s=2.0)
    assert not server.refused


def test_a_burst_is_no_overload():
    server = Server()
    server.run(poisson(0.9, 10.0), deadline_s=2.0)  # so that its rate is known
    start = server.now
    server.run([(start + 0.01 * number, 250) for number in range(80)], deadline_s=2.0)  # a second's work, in 0.8 s
    assert not server.refused
    assert max(call.wait for call in server.done) > 3 * LEAST_STANDING_S / 4


def test_long_deadlines_may_stand_longer():
    server = Server()
    server.run(poisson(1.5, 60.0), deadline_s=20.0)
    assert server.refused[Overloaded] > 0 and server.refused[DeadlinePassed] == 0
    late = [call.wait for call in server.done if call.at > 30.0]
    assert 0.8 * 20 * SHARE_STANDING < max(late) < 20 * SHARE_STANDING + 0.3


def test_a_call_is_held_against_its_own_size():
    """Large calls, one after the other, keep a queue for good: each may wait for a few like itself."""
    server = Server()
    arrivals = [(number * 1.01, 20_000) for number in range(40)]  # of a second's work each
    arrivals += [(number * 20.2 + 0.5, 20_000) for number in range(2)]
    server.run(arrivals, deadline_s=6.0)
    assert not server.refused and len(server.done) == 42


def test_without_a_deadline_the_queue_is_bounded_in_time():
    server = Server(max_time_s=3.0)
    server.run(poisson(2.0, 60.0), deadline_s=None)
    late = [call.wait for call in server.done if call.at > 10.0]
    assert 2.5 < max(late) < 3.3
    assert server.refused == {Overloaded: server.refused.total()}
    assert all(0.1 < wait < 1.0 for wait in server.retry_after)
    free = Server()
    free.run(poisson(2.0, 5.0), deadline_s=None)
    assert not free.refused


def test_light_load_says_nothing_about_what_a_model_can_do():
    server = Server(max_time_s=1.0)
    server.run([(0.1 * number, 10) for number in range(1000)], deadline_s=1.0)
    assert server.admission.tokens_per_s is None
    server.run([(server.now + 0.001 * number, 100) for number in range(1000)], deadline_s=6.0)
    assert not server.refused


def test_what_stands_and_what_is_a_burst():
    standing = Standing()
    assert [standing.met(now) for now in (0.0, BURST_S / 2, BURST_S, BURST_S + CALM_S)] == [False, False, True, True]
    later = BURST_S + 2 * CALM_S + 0.1
    assert [standing.met(later), standing.met(later + BURST_S)] == [False, True]
