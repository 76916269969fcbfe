"""What may come in: bounds on requests and tokens, deadlines against the observed rate, what a refusal says."""

import pytest

from pyruntime.admission import RETRY_RANGE_S, UNKNOWN_RETRY_S, Admission
from pyruntime.errors import DeadlinePassed, Overloaded
from pyruntime.overload import EVIDENCE_S, WINDOW_S, Rate
from pyruntime.types import Task


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def admission(clock):
    return Admission("m", max_requests=4, max_tokens=1000, clock=clock)


def queue(admission, num_tokens, task=Task.EMBED, priority=0):
    ticket = admission.admit(task, priority)
    admission.enter(ticket, num_tokens)
    return ticket


def work(admission, tokens_per_s, requests_per_s=1.0, seconds=5.0):
    """The engine has done that much a second."""
    for _ in range(round(seconds * 10)):
        admission.note(tokens_per_s / 10, requests_per_s / 10, 0.1, left_some=True)


def test_requests_are_bounded_from_before_tokenising_until_released(admission):
    tickets = [admission.admit(Task.EMBED) for _ in range(4)]
    with pytest.raises(Overloaded, match="model m: 4 requests are open, the most that this server takes"):
        admission.admit(Task.EMBED)
    with tickets[0]:
        pass
    tickets[0].release()  # again: changes nothing
    assert admission.num_open == 3
    admission.admit(Task.SCORE)
    with pytest.raises(Overloaded):
        admission.admit(Task.SCORE)


def test_tokens_are_bounded_before_tokenising_and_after(admission):
    queue(admission, 900)
    with pytest.raises(Overloaded, match="900 tokens wait; allowed with this request's 101: 1000"):
        admission.admit(Task.EMBED, num_ids=101)
    ticket = admission.admit(Task.EMBED, num_ids=50)
    assert admission.num_queued_tokens == 950
    with pytest.raises(Overloaded, match="900 tokens wait; allowed with this request's 101: 1000"):
        admission.enter(ticket, 101)
    ticket.release()
    assert (admission.num_open, admission.num_queued_tokens) == (1, 900)


def test_an_estimate_gives_way_to_the_exact_number(admission):
    with admission.admit(Task.EMBED, num_bytes=3000) as ticket:
        estimate = admission.num_queued_tokens
        assert 0 < estimate < 3000 / 4
        admission.enter(ticket, 700)
        assert admission.num_queued_tokens == 700
        admission.leave(ticket.line, 300)
        assert admission.num_queued_tokens == 400
    assert (admission.num_open, admission.num_queued_tokens) == (0, 400)  # tokens leave on their own
    admission.leave((Task.EMBED, 0), 400)
    assert admission.num_queued_tokens == 0


def test_a_request_larger_than_the_bound_is_served_when_it_is_alone(admission):
    ticket = queue(admission, 5000)
    with pytest.raises(Overloaded):
        queue(admission, 1)
    admission.leave(ticket.line, 5000)
    queue(admission, 5000)


def test_the_estimate_follows_the_texts_and_stays_below_them(admission):
    def estimate():
        with admission.admit(Task.EMBED, num_bytes=1000):
            return admission.num_queued_tokens

    def serve(num_bytes, num_tokens, num_ids=0):
        with admission.admit(Task.EMBED, num_bytes=num_bytes, num_ids=num_ids) as ticket:
            admission.enter(ticket, num_tokens)
            admission.leave(ticket.line, num_tokens)

    assert estimate() == 100
    for _ in range(200):
        serve(100, 60)
    assert estimate() == pytest.approx(300, abs=2)
    for _ in range(50):
        serve(10, 12)  # short, so mostly special tokens
        serve(100, 900, num_ids=800)  # ids say nothing about the tokenizer
    assert estimate() == pytest.approx(300, abs=2)
    for _ in range(200):
        serve(800, 1)
    assert estimate() == pytest.approx(1000 / 16 / 2, abs=2)


def test_a_refusal_says_when_enough_will_have_drained(admission):
    queue(admission, 1000)
    with pytest.raises(Overloaded) as refusal:
        admission.admit(Task.EMBED, num_ids=200)
    assert refusal.value.retry_after_s == UNKNOWN_RETRY_S
    work(admission, tokens_per_s=500, requests_per_s=2)
    with pytest.raises(Overloaded) as refusal:
        admission.admit(Task.EMBED, num_ids=200)
    assert refusal.value.retry_after_s == pytest.approx((200 + 1000 / 16) / 500)
    with pytest.raises(Overloaded) as refusal:
        admission.admit(Task.EMBED, num_ids=10**9)  # nothing helps it but an empty queue
    assert refusal.value.retry_after_s == pytest.approx(1000 / 500)
    for _ in range(3):
        admission.admit(Task.EMBED)
    with pytest.raises(Overloaded) as refusal:
        admission.admit(Task.EMBED)
    assert refusal.value.retry_after_s == pytest.approx((1 + 4 / 16) / 2)


@pytest.mark.parametrize(("rate", "bound"), [(1e-6, RETRY_RANGE_S[1]), (1e12, RETRY_RANGE_S[0])])
def test_what_a_refusal_says_is_bounded(admission, rate, bound):
    queue(admission, 1000)
    work(admission, tokens_per_s=rate)
    with pytest.raises(Overloaded) as refusal:
        queue(admission, 100)
    assert refusal.value.retry_after_s == bound


def test_a_deadline_is_held_against_what_is_sure_to_come_first(admission, clock):
    queue(admission, 400)
    work(admission, tokens_per_s=100)
    with pytest.raises(DeadlinePassed, match=r"in 5.300 s cannot be met: 400 tokens come first, at 100 a second"):
        admission.admit(Task.EMBED, deadline=clock.now + 5.3)
    for task, priority, deadline in [
        (Task.EMBED, 0, 5.4),  # enough time: three quarters of it
        (Task.EMBED, 1, 0.1),  # goes before them
        (Task.SCORE, 0, 0.1),  # has a share of its own
    ]:
        admission.admit(task, priority, deadline=clock.now + deadline).release()
    with pytest.raises(DeadlinePassed):
        admission.admit(Task.EMBED, -1, deadline=clock.now + 5.3)


def test_what_has_been_tokenised_is_refused_only_when_all_of_its_time_is_too_little(admission, clock):
    queue(admission, 400)
    work(admission, tokens_per_s=100)
    tickets = [admission.admit(Task.EMBED, deadline=clock.now + 5.4) for _ in range(2)]
    queue(admission, 100)
    admission.enter(tickets[0], 60)
    with pytest.raises(DeadlinePassed, match="560 tokens come first"):
        admission.enter(tickets[1], 10)


def test_a_request_counts_its_own_tokens_only_when_no_cache_can_hold_them(admission, clock):
    work(admission, tokens_per_s=100)
    ticket = admission.admit(Task.GENERATE, deadline=clock.now + 1)
    admission.enter(ticket, 500)
    ticket = admission.admit(Task.EMBED, deadline=clock.now + 1)
    with pytest.raises(DeadlinePassed, match="101 tokens come first"):
        admission.enter(ticket, 500, least_tokens=101)


def test_a_cold_engine_refuses_no_deadline_but_a_passed_one(admission, clock):
    queue(admission, 1000)
    work(admission, tokens_per_s=100, seconds=EVIDENCE_S / 2)
    ticket = admission.admit(Task.EMBED, deadline=clock.now + 0.001)
    clock.now += 1
    with pytest.raises(DeadlinePassed, match="passed before the request was queued"):
        admission.enter(ticket, 1)
    with pytest.raises(DeadlinePassed, match="passed before"):
        admission.admit(Task.EMBED, deadline=clock.now)


def test_lines_of_priorities_that_clients_make_up_are_forgotten(admission):
    for priority in range(5000):
        with admission.admit(Task.EMBED, priority) as ticket:
            admission.enter(ticket, 1)
            admission.leave(ticket.line, 1)
    assert admission._queued == {}


def test_a_rate_follows_a_change_and_ignores_idle_time():
    rate = Rate()
    rate.note(10, EVIDENCE_S * 0.9)
    assert rate.per_s is None
    for _ in range(int(WINDOW_S * 50)):
        rate.note(10, 0.1)
    assert rate.per_s == pytest.approx(100, rel=0.01)
    for _ in range(int(WINDOW_S * 50)):
        rate.note(1, 0.1)
    assert rate.per_s == pytest.approx(10, rel=0.1)


def test_texts_that_are_still_being_tokenised_come_first_too(admission, clock):
    work(admission, tokens_per_s=100)
    with admission.admit(Task.EMBED, num_ids=400), pytest.raises(DeadlinePassed, match="400 tokens come first"):
        admission.admit(Task.EMBED, deadline=clock.now + 5.3)
    admission.admit(Task.EMBED, deadline=clock.now + 0.1).release()
