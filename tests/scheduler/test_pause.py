"""Sequences that stand aside: paused, set back after a failed step, or ended in whatever state they are in."""

import pytest

from pyruntime.scheduler.sequence import State
from pyruntime.types import Task
from tests.scheduler.sequences import planned
from tests.scheduler.world import World


def streaming(world, count=2, length=6, **fields):
    """So many streams that have their first token."""
    streams = [world.generate([10 * i] * length, 20, **fields)[0] for i in range(1, count + 1)]
    while not all(s.num_generated for s in streams):
        world.step()
    return streams


def test_a_paused_stream_is_in_no_plan_keeps_its_blocks_and_goes_on_where_it_was():
    w = World()
    slow, fast = streaming(w)
    w.scheduler.pause(slow)
    before = list(slow.blocks)
    for _ in range(3):
        assert planned(w.step()) == [(fast, 1)]
    assert (slow.state, slow.blocks) == (State.PAUSED, before)
    w.scheduler.resume(slow)
    assert (slow, 1) in planned(w.step())
    assert slow.num_starts == 1
    w.drain()


def test_nothing_is_left_to_do_when_all_are_paused():
    w = World()
    streams = streaming(w)
    for stream in streams:
        w.scheduler.pause(stream)
    assert not w.scheduler.has_work
    assert not w.scheduler.schedule().entries
    assert w.scheduler.load().num_paused == 2
    w.drain()


def test_a_paused_stream_gives_way_before_any_that_runs_and_is_computed_anew():
    w = World(num_blocks=7)
    slow, fast = streaming(w)  # 2 blocks each; the paused one is the older
    w.scheduler.pause(slow)
    while slow.blocks:
        assert (fast, 1) in planned(w.step())
    assert (slow.state, slow.num_computed) == (State.PAUSED, 0)
    assert fast.num_starts == 1
    w.scheduler.resume(slow)
    assert slow.state is State.WAITING
    w.drain()
    assert slow.num_starts == 2


def test_a_waiting_prompt_gets_the_blocks_of_paused_streams_only_if_they_do():
    w = World(num_blocks=10, budget=64)
    streams = streaming(w, 3)
    for stream in streams[:2]:
        w.scheduler.pause(stream)
    (large,) = w.embed([1] * 36)  # nine blocks: not even with those of both
    w.step()
    assert all(stream.blocks for stream in streams)
    (small,) = w.items([1] * 20, [])  # five, of which four are free
    w.step()
    assert small.num_starts == 1
    assert [bool(stream.blocks) for stream in streams] == [True, False, True]
    w.cancel([large])
    w.drain()


def test_one_that_waits_can_be_paused_too():
    w = World(num_blocks=64, budget=4)
    first, second = w.embed([1] * 8)[0], w.generate([2] * 8, 1)[0]
    w.scheduler.pause(second)
    while w.scheduler.has_work:
        w.step()
    assert (first.state, second.state) == (State.FINISHED, State.PAUSED)
    w.scheduler.pause(first)
    w.scheduler.resume(first)
    assert first.state is State.FINISHED
    w.drain()


@pytest.mark.parametrize("state", list(State))
def test_a_cancelled_request_leaves_nothing_in_whatever_state(state):
    w = World(num_blocks=40, budget=4)
    request = w.generate([1] * 9, 4, n=2)
    target = request[1] if state is State.PENDING else request[0]
    for _ in range(50):
        if state is State.PAUSED and target.num_generated:
            w.scheduler.pause(target)
        if state is State.HOLDING and target.num_generated:
            w.scheduler.finish(target)
        if target.state is state:
            break
        w.step()
    assert target.state is state
    w.cancel(request)
    assert (w.pool.num_used, w.scheduler.has_work) == (0, False)
    assert w.scheduler.load().waiting_tokens[Task.GENERATE] == 0


def test_a_prompt_cancelled_between_two_chunks_frees_its_blocks_at_once():
    w = World(num_blocks=40, budget=4)
    request = w.embed([1] * 20)
    w.step()
    w.step()
    assert w.pool.num_used == 2
    w.cancel(request)
    assert (w.pool.num_used, w.pool.num_cached) == (0, 2)


def test_prompts_that_nobody_continues_leave_only_what_the_cache_keeps():
    for cached, kept in ((True, 5), (False, 0)):
        w = World(num_blocks=40, budget=64, cached=cached)
        w.embed([1] * 9)
        w.items([2] * 8, [[3], [4, 5]])
        w.drain()
        assert (w.pool.num_used, w.pool.num_cached) == (0, kept - 1 if cached else 0)


def test_a_failed_step_is_run_in_halves_and_copies_go_with_those_who_need_them():
    w = World(num_blocks=40, budget=64)
    prefix, *items = w.items([1] * 6, [[2], [3], [4]])
    w.step()
    plan = w.plan()
    assert [s for s, _ in plan.entries] == items
    assert len(plan.block_copies) == 3
    first, second = plan.halves()
    assert [s for s, _ in first.entries] == items[:2]
    assert [s for s, _ in second.entries] == items[2:]
    assert first.block_copies + second.block_copies == plan.block_copies
    assert first.num_tokens + second.num_tokens == plan.num_tokens
    w.run(first)
    w.embed([9] * 4)  # the prefix is done with, but the second half still copies from it
    assert prefix.state is State.FINISHED
    w.run(second)
    w.drain()


def test_a_half_leaves_out_who_has_ended_since():
    w = World(num_blocks=40, budget=64)
    texts = [w.embed([i] * 4) for i in range(1, 4)]
    plan = w.plan()
    w.cancel(texts[0])
    first, second = plan.halves()
    assert planned(first) == [(texts[1][0], 4)]
    assert planned(second) == [(texts[2][0], 4)]
    alone, nothing = second.halves()
    assert planned(alone) == planned(second)
    assert not nothing.entries
    w.run(plan)
    w.drain()
