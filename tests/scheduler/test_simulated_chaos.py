"""A minute of simulated time at four times what the machine can do: refusals, deadlines, cancels, slow readers, faults.

The scheduler, its blocks and the admission are the real ones; the clock and the model are not.
"""

from collections import Counter
from random import Random

import pytest

from pyruntime.admission import Admission
from pyruntime.errors import DeadlinePassed, Overloaded
from pyruntime.scheduler.simulation import Arrival, Machine, Simulation
from pyruntime.types import Task

SECONDS = 60.0
NUM_BLOCKS = 120  # so that sequences are set back


def arrivals(draw, rate):
    """``rate`` requests a second, some in bursts."""
    time_s = 0.0
    while time_s < SECONDS:
        if draw.random() > 0.1:
            time_s += draw.expovariate(rate * 0.9)
        task = draw.choice(list(Task))
        yield Arrival(
            time_s,
            task,
            prompt_tokens=draw.choice([3, 30, 200, 900]),
            new_tokens=draw.choice([1, 20, 100]) if task is Task.GENERATE else 0,
            items=draw.randrange(1, 5),
            priority=draw.randint(-2, 2),
            prefix_tokens=draw.choice([0, 64, 100]),
            prefix=draw.randrange(4),
            cancel_after_s=draw.expovariate(0.5) if draw.random() < 0.15 else None,
        )


class Storm(Simulation):
    """What stands around a scheduler in the engine, in short: admission before it, and a client for each request."""

    def __init__(self, draw, rate, **options):
        super().__init__(arrivals(draw, rate), machine=Machine(seconds_a_token=0.001), num_blocks=NUM_BLOCKS, **options)
        self.admission = Admission("model", max_requests=64, max_tokens=8000, clock=lambda: self.now)
        self.outcomes = Counter()
        self.work = Counter()
        self.tickets = {}
        self._draw = draw

    def _arrive(self, arrival):
        self.work["arrived"] += 1
        self.work["tokens"] += arrival.prefix_tokens + arrival.items * (arrival.prompt_tokens + arrival.new_tokens)
        deadline = self.now + self._draw.uniform(0, 10) if self._draw.random() < 0.3 else None
        total = arrival.prefix_tokens + arrival.prompt_tokens * arrival.items
        try:
            ticket = self.admission.admit(arrival.task, arrival.priority, num_bytes=total * 4, deadline=deadline)
        except (Overloaded, DeadlinePassed) as refusal:
            self.outcomes[type(refusal)] += 1
            return
        try:
            self.admission.enter(ticket, total)
        except (Overloaded, DeadlinePassed) as refusal:
            ticket.release()
            self.outcomes[type(refusal)] += 1
            return
        super()._arrive(arrival)
        request = self._outcome.requests[-1]
        self.tickets[request] = [ticket, total]
        if deadline is not None:
            self._at(deadline, lambda: self._cancel(request, "late"))
        for _ in range(3):
            self._at(self.now + self._draw.uniform(0, 8), lambda: self._read_slowly(request))

    def _read_slowly(self, request):
        """Its buffer is full for a while; sequences that wait for their parent's prompt have none yet."""
        if request.ended_at is None and request.arrival.task is Task.GENERATE and request.token_times:
            self.work["paused"] += 1
            for sequence in request.sequences:
                self.scheduler.pause(sequence)
            self._at(self.now + self._draw.uniform(0, 5), lambda: self._resume(request))

    def _resume(self, request):
        for sequence in request.sequences:
            self.scheduler.resume(sequence)

    def _cancel(self, request, why="cancelled"):
        if request.ended_at is None:
            super()._cancel(request)
            self._end(request, why)

    def _end(self, request, why):
        ticket, waiting = self.tickets.pop(request)  # KeyError: it ends a second time
        self.outcomes[why] += 1
        self.admission.leave(ticket.line, waiting)
        ticket.release()

    def _note(self, plan, seconds):
        super()._note(plan, seconds)
        members = [sequence for sequence, _ in plan.entries]
        self.work["set back"] += sum(s.num_starts > 1 and s.num_computed == 0 for s in members)
        done = 0
        for request in {sequence.owner for sequence in members}:
            mine = self.tickets[request]
            read = min(mine[1], sum(n for s, n in plan.entries if s.owner is request and not s.num_generated))
            mine[1] -= read
            self.admission.leave(mine[0].line, read)
            done += read
        self.admission.note(done, 0, seconds, left_some=True)
        if self._draw.random() < 0.02:  # the step failed for one of its requests, whose culprit was found
            self._cancel(self._draw.choice(members).owner, "failed")
        assert self.pool.num_used + self.pool.num_free == NUM_BLOCKS

    def _read(self, sequence):
        request = sequence.owner
        if request.ended_at is None:
            super()._read(sequence)
            if request.ended_at is not None:
                self._end(request, "answered")


@pytest.mark.parametrize("seed", [1, 2])
def test_every_request_of_a_storm_ends_once_and_nothing_is_left(seed):
    storm = Storm(Random(seed), rate=6.0, max_batch_tokens=512, max_running=32, priority_ageing_s=2.0)
    outcome = storm.run()
    outcomes = storm.outcomes
    assert outcome.seconds >= SECONDS
    assert set(outcomes) == {"answered", "cancelled", "late", "failed", Overloaded, DeadlinePassed}
    assert outcomes.total() == storm.work["arrived"] > 200
    assert storm.work["paused"] > 0 < storm.work["set back"]
    assert storm.work["tokens"] / SECONDS > 4 * sum(outcome.computed_tokens.values()) / outcome.seconds
    for request in outcome.requests:
        assert request.ended_at is not None
        if not request.is_cancelled and request.arrival.task is Task.GENERATE:
            assert [len(times) for times in request.token_times.values()] == (
                [request.arrival.new_tokens] * request.arrival.items
            )
    load = storm.scheduler.load()
    assert not storm.tickets
    assert (storm.admission.num_open, storm.admission.num_queued_tokens) == (0, 0)
    assert (storm.pool.num_used, load.num_paused) == (0, 0)
    for numbers in (load.num_waiting, load.waiting_tokens, load.num_running, load.running_tokens):
        assert not any(numbers.values())
