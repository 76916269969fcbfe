"""Prompts that share a prefix which nobody has computed yet: one computes it, the others wait."""

from pyruntime.scheduler.groups import MAX_STEPS
from pyruntime.scheduler.sequence import State
from pyruntime.types import Task
from tests.scheduler.sequences import planned
from tests.scheduler.world import World

SYSTEM = [1] * 16


def world(**options):
    return World(**{"num_blocks": 100, "budget": 64, "max_running": 32} | options)


def computed(plan):
    return [count for _, count in plan.entries]


def test_one_computes_the_prefix_and_the_others_their_own_tokens():
    w = world()
    requests = [w.generate(SYSTEM + [10 + i] * 3, 2)[0] for i in range(5)]
    assert planned(w.step()) == [(requests[0], 19)]
    assert computed(w.step()) == [1, 3, 3, 3, 3]
    assert [s.cached_tokens for s in requests] == [0, 16, 16, 16, 16]
    w.drain()


def test_tasks_share_one_prefix_too():
    w = world()
    stream = w.generate([*SYSTEM, 2], 1)[0]
    prefix, *items = w.items(SYSTEM, [[3], [4]])
    assert planned(w.step()) == [(stream, 17)]
    w.drain()
    assert prefix.cached_tokens == 12
    assert [item.cached_tokens for item in items] == [12, 16]


def test_they_wait_for_all_that_is_common_chunk_by_chunk():
    w = world(budget=8)
    leader, follower = w.generate(SYSTEM + [2] * 8, 1)[0], w.generate(SYSTEM + [3] * 8, 1)[0]
    assert planned(w.step()) == [(leader, 8)]
    assert planned(w.step()) == [(leader, 8)]
    assert planned(w.step()) == [(leader, 8)]
    assert planned(w.step()) == [(follower, 8)]
    assert follower.cached_tokens == 16
    w.drain()


def test_a_short_common_part_is_not_waited_for():
    w = world()
    for last in (2, 3):
        w.generate([1] * 4 + [last] * 8, 1)
    assert computed(w.step()) == [12, 12]
    w.drain()


def test_other_salts_are_other_prefixes():
    w = world()
    for salt in ("", "a", b"a"):
        w.generate([*SYSTEM, 2], 1, cache_salt=salt)
    assert computed(w.step()) == [17, 17, 17]
    (again,) = w.generate([*SYSTEM, 2], 1, cache_salt="a")
    w.step()
    assert again.cached_tokens == 16
    w.drain()


def test_a_cancelled_leader_frees_the_others():
    w = world(budget=8)
    leader = w.generate([*SYSTEM, 2], 1)
    others = [w.generate([*SYSTEM, 3 + i], 1)[0] for i in range(3)]
    w.step()
    w.cancel(leader)
    assert planned(w.step()) == [(others[0], 8)]
    assert others[0].cached_tokens == 8
    w.drain()
    assert [s.cached_tokens for s in others[1:]] == [16, 16]


def test_cancelled_followers_leave_no_trace():
    w = world(budget=8)
    w.generate([*SYSTEM, 2], 1)
    follower = w.generate([*SYSTEM, 3], 1)
    w.step()
    w.cancel(follower)
    w.drain()
    groups = w.scheduler._population.groups
    assert not (groups._leaders or groups._keys or groups._followers or groups._waits)


def test_nobody_waits_for_a_lower_rank():
    w = world(budget=8)
    low = w.generate([*SYSTEM, 2], 1)[0]
    w.step()
    high = w.generate([*SYSTEM, 3], 1, priority=1)[0]
    assert planned(w.step()) == [(high, 8)]
    w.drain()
    assert low.num_starts == 1


def test_the_wait_is_bounded_though_the_leader_stands_still():
    """Streams take every token of the budget, so the leader, of another task, gets none."""
    w = world(budget=2, max_running=8)
    streams = [w.generate([20 + i], 500)[0] for i in range(2)]
    w.step()
    w.step()
    w.scheduler.pause(streams[1])
    leader = w.embed([*SYSTEM, 2])[0]
    follower = w.generate([*SYSTEM, 3], 1)[0]
    for _ in range(4):
        w.step()
    assert leader.state is State.RUNNING
    assert follower.state is State.WAITING
    assert not follower.ticket
    w.scheduler.resume(streams[1])
    for _ in range(MAX_STEPS):
        w.step()
    assert follower.ticket
    w.scheduler.pause(streams[1])
    for _ in range(4):
        w.step()
    assert follower.num_starts == 1  # it does not wait again
    assert leader.num_remaining > 4
    w.scheduler.resume(streams[1])
    w.cancel(streams)
    w.drain()


def test_embeddings_that_read_every_row_take_no_part():
    w = world()
    for _ in range(2):
        w.embed([*SYSTEM, 2], reuses_prefix=False)
    plan = w.step()
    assert computed(plan) == [17, 17]
    assert {s.task for s, _ in plan.entries} == {Task.EMBED}
