"""The thread that a device's engines share."""

import gc
import threading
import weakref
from collections import deque

import pytest

from pyruntime.step_thread import ENDED, StepThread, device_thread


class Scripted:
    """Has one turn after the other: each gives what is next in ``answers``, calls it, or ends."""

    def __init__(self, *answers, log=None):
        self.answers = deque(answers)
        self.log = log if log is not None else []
        self.ended = threading.Event()

    def turn(self):
        self.log.append((self, threading.current_thread()))
        if not self.answers:
            self.ended.set()
            return ENDED
        answer = self.answers.popleft()
        return answer() if callable(answer) else answer


@pytest.fixture
def thread():
    return StepThread("device-test")


def join(*members):
    """Their threads, once all of them have ended."""
    for member in members:
        assert member.ended.wait(10)
    threads = {each for member in members for _, each in member.log}
    for each in threads:
        each.join(10)
        assert not each.is_alive()
    return threads


def test_members_have_their_turns_one_after_the_other_on_one_thread(thread):
    log, begun, both = [], threading.Event(), threading.Event()
    first = Scripted(lambda: begun.set() or both.wait(10) * 0.0, 0.0, 0.0, log=log)
    second = Scripted(0.0, 0.0, 0.0, log=log)
    thread.add(first)
    assert begun.wait(10)
    thread.add(second)
    both.set()
    (one,) = join(first, second)
    assert one.name == "device-test"
    assert [member for member, _ in log] == [first, *[first, second] * 3, second]


def test_a_member_that_waits_has_a_turn_when_it_is_woken_and_not_before(thread):
    waits = threading.Event()
    member = Scripted(waits.set)
    thread.add(member)
    assert waits.wait(10)
    assert not member.ended.is_set()
    thread.wake()
    join(member)


def test_a_wake_while_a_turn_is_taken_is_not_lost(thread):
    member = Scripted(thread.wake)
    thread.add(member)
    join(member)


def test_a_member_that_asks_for_it_has_a_turn_later_unasked(thread):
    member = Scripted(0.001)
    thread.add(member)
    join(member)
    assert len(member.log) == 2


def test_who_raises_has_no_more_turns_and_the_others_go_on(thread, caplog):
    both = threading.Event()
    bad = Scripted(lambda: both.wait(10) * 0.0, lambda: exec("raise SystemExit"), 0.0)
    good = Scripted(0.0, 0.0, 0.0)
    thread.add(bad)
    thread.add(good)
    both.set()
    thread.wait_for_end(bad)
    join(good)
    assert len(bad.answers) == 1
    assert "a member of a step thread failed" in caplog.text


def test_the_thread_ends_with_its_last_member_and_the_next_one_has_a_new_one(thread):
    first, second = Scripted(), Scripted()
    thread.add(first)
    (before,) = join(first)
    thread.add(second)
    (after,) = join(second)
    assert before is not after


def test_nothing_of_a_member_outlives_it(thread):
    had_turn = threading.Event()
    stays, goes = Scripted(*[had_turn.set] * 3), Scripted()
    watch = weakref.ref(goes)
    thread.add(stays)
    thread.add(goes)
    assert goes.ended.wait(10)
    del goes
    had_turn.clear()
    thread.wake()
    assert had_turn.wait(10)
    gc.collect()
    assert watch() is None
    while not stays.ended.is_set():
        thread.wake()
    join(stays)


def lend(thread, member):
    """As soon as the thread waits."""
    while not thread.try_turn(member):
        pass


def test_a_turn_is_lent_to_another_thread_while_there_is_nothing_to_do(thread):
    member = Scripted(None, None)
    thread.add(member)
    lend(thread, member)
    assert [at.name for _, at in member.log] == ["device-test", threading.current_thread().name]
    assert not member.ended.is_set()
    thread.wake()
    join_own(thread, member)


def join_own(thread, member):
    assert member.ended.wait(10)
    thread.wait_for_end(member)


def test_no_turn_is_lent_while_one_is_taken_or_wanted(thread):
    begun, go_on = threading.Event(), threading.Event()
    busy, other = Scripted(lambda: begun.set() or (go_on.wait(10) and None)), Scripted(None, None)
    thread.add(other)
    lend(thread, other)
    thread.add(busy)
    assert begun.wait(10)
    assert not thread.try_turn(other)
    thread.wake()
    assert not thread.try_turn(other)
    go_on.set()
    join_own(thread, busy)
    join_own(thread, other)


def test_the_thread_waits_for_the_end_of_a_lent_turn_and_then_has_its_own(thread):
    seen = []

    def during():
        thread.wake()
        assert not thread.try_turn(second)
        seen.append(len(second.log))

    first, second = Scripted(None, during), Scripted(None)
    thread.add(first)
    thread.add(second)
    lend(thread, first)
    join_own(thread, second)
    join_own(thread, first)
    assert seen == [1]
    assert [at is threading.current_thread() for _, at in first.log] == [False, True, False]


def test_a_member_that_ends_in_a_lent_turn_has_no_more(thread):
    member = Scripted(None)
    thread.add(member)
    lend(thread, member)
    join_own(thread, member)
    assert [at is threading.current_thread() for _, at in member.log] == [False, True]


def test_who_wants_more_after_a_lent_turn_has_it_on_the_thread(thread):
    member = Scripted(None, 0.0)
    thread.add(member)
    lend(thread, member)
    join_own(thread, member)
    assert [at is threading.current_thread() for _, at in member.log] == [False, True, False]


def test_a_device_has_one_thread():
    assert device_thread("test:0") is device_thread("test:0")
    assert device_thread("test:0") is not device_thread("test:1")
