"""Who goes first: classes that age, shares of tasks, places in the batch."""

import pytest

from pyruntime.scheduler.queue import FEW_STALE
from pyruntime.scheduler.room import MAX_STEPS_PASSED
from pyruntime.scheduler.scheduler import Scheduler
from pyruntime.scheduler.sequence import Sequence, State
from pyruntime.scheduler.shares import TaskShares
from pyruntime.types import Task
from tests.scheduler.sequences import make, planned, prompt
from tests.scheduler.world import World

OTHERS = {Task.EMBED: World.embed, Task.GENERATE: lambda world, ids: world.generate(ids, 1)}


def started_after_flood(ageing_s, seconds=2.0):
    """When a request of class 0 starts while one of class 3 arrives every 10 ms; None: not within ``seconds``."""
    world = World(num_blocks=64, budget=8, cached=False, priority_ageing_s=ageing_s)
    (low,) = world.embed([1] * 8)
    while world.now < seconds:
        world.embed([2] * 8, priority=3)
        world.step()
        if low.num_starts:
            return world.now
    return None


def test_a_flood_of_a_high_class_holds_a_low_one_up_for_as_long_as_ageing_says():
    assert started_after_flood(0.0) is None
    assert 0.29 <= started_after_flood(0.1) <= 0.33


def test_a_class_goes_by_arrival_and_one_that_ages_is_overtaken_no_more():
    world = World(num_blocks=64, budget=4, cached=False, priority_ageing_s=1.0)
    low = [world.embed([1] * 4)[0] for _ in range(3)]
    world.now = 0.5
    high = [world.embed([1] * 4, priority=1)[0] for _ in range(2)]
    world.now = 1.5
    late = world.embed([1] * 4, priority=1)[0]
    world.drain()
    assert world.order == [*high, *low, late]


def test_what_is_set_back_keeps_its_arrival():
    world = World(num_blocks=64, budget=4, cached=False)
    first, second = world.embed([1] * 8)[0], world.embed([1] * 8)[0]
    world.step()
    world.scheduler.reset(first)
    assert (first.state, first.blocks, first.num_computed) == (State.WAITING, [], 0)
    assert planned(world.step()) == [(first, 4)]
    world.drain()
    assert second.num_starts == 1


@pytest.mark.parametrize("flood", list(OTHERS))
def test_a_flood_of_one_task_leaves_the_other_its_share(flood):
    """Both have work at all times, the flood a hundred times as much: prompt tokens go 1 : 1, or by weight."""
    (other,) = set(OTHERS) - {flood}
    for weight in (1.0, 3.0):
        world = World(num_blocks=400, budget=16, max_running=64, cached=False, task_shares={other: weight})
        for _ in range(400):
            OTHERS[flood](world, [1] * 12)
        for _ in range(60):
            OTHERS[other](world, [1] * 12)
        computed = dict.fromkeys(OTHERS, 0)
        for _ in range(40):
            for sequence, count in world.step().entries:
                computed[sequence.task] += count
        assert computed[other] / computed[flood] == pytest.approx(weight, rel=0.15)


def test_shares_save_nothing_up_and_leave_nothing_idle():
    shares = TaskShares()
    shares.begin([Task.EMBED])
    shares.charge(Task.EMBED, 1000)
    shares.begin([Task.EMBED, Task.GENERATE])  # Generate was idle while Embed had 1,000
    assert shares.time(Task.GENERATE) == shares.time(Task.EMBED) == 1000
    alone = World(num_blocks=64, budget=16, cached=False, task_shares={Task.GENERATE: 100.0})
    alone.embed([1] * 40)
    assert alone.step().num_tokens == 16
    with pytest.raises(ValueError, match=r"task_shares: embed is 0; allowed: above 0"):
        TaskShares({Task.EMBED: 0})


def test_a_task_that_finds_no_room_gets_no_credit_for_it():
    shares = TaskShares()
    for _ in range(100):
        shares.begin([Task.EMBED, Task.GENERATE])
        shares.charge(Task.EMBED, 10)
        shares.forgo(Task.GENERATE)
    shares.begin([Task.EMBED, Task.GENERATE])
    assert shares.time(Task.EMBED) - shares.time(Task.GENERATE) <= 10


def test_high_classes_of_one_task_do_not_take_the_share_of_another():
    world = World(num_blocks=64, budget=8, cached=False)
    for _ in range(8):
        world.embed([1] * 8, priority=9)
    stream = world.generate([1] * 8, 1)[0]
    world.step()
    world.step()
    assert stream.num_starts == 1
    world.drain()


def test_streams_never_take_every_place():
    scheduler = make(max_running=2)
    scheduler.add([prompt(2)])
    scheduler.add([prompt(2)])
    scheduler.add([prompt(2)])
    scheduler.advance(scheduler.schedule())
    assert len(scheduler.running) == 2
    for stream in scheduler.running:
        scheduler.append_token(stream, 1)
    late = prompt(3, Task.EMBED)
    scheduler.add([late])
    assert (late, 3) in planned(scheduler.schedule())


def test_a_sixteenth_of_the_places_is_kept_for_each_other_task_that_was_seen():
    world = World(num_blocks=300, budget=256, max_running=32, cached=False, max_pause_factor=0)
    world.embed([1])
    world.drain()
    for _ in range(40):
        world.generate([1], 30)
    world.step()
    assert world.scheduler.load().num_running[Task.GENERATE] == 30
    texts = [world.embed([1] * 100)[0] for _ in range(5)]
    world.step()
    assert [text.num_starts for text in texts] == [1, 1, 0, 0, 0]
    world.drain()


def test_an_encoder_text_that_fits_no_rest_of_a_step_is_not_starved_by_short_ones():
    scheduler = Scheduler(None, 10, 16, equal_cost_depth=0)
    long = prompt(25, Task.CLASSIFY)
    scheduler.add([long])
    for _ in range(30):
        scheduler.add([prompt(4, Task.EMBED, priority=9)])
        scheduler.add([prompt(4, Task.EMBED, priority=9)])
        plan = scheduler.schedule()
        scheduler.advance(plan)
        for sequence, _ in plan.entries:
            scheduler.finish(sequence)
    assert long.state is State.FINISHED


def test_cancelled_sequences_do_not_stay_in_the_queue():
    scheduler = make()
    requests = [prompt(4) for _ in range(2000)]
    for sequence in requests:
        scheduler.add([sequence])
    for sequence in requests[1:]:
        scheduler.drop(sequence)
    assert len(scheduler._queue._heaps[Task.GENERATE]) <= 2 * FEW_STALE
    assert scheduler.load().waiting_tokens[Task.GENERATE] == 4
    assert planned(scheduler.schedule()) == [(requests[0], 4)]


def test_a_prompt_that_lacks_blocks_lets_others_pass_for_a_while_only():
    world = World(num_blocks=60, budget=32, max_running=16, cached=False)
    world.generate([1] * 24, 150)
    world.step()
    large = world.embed([1] * 220)[0]
    small = []
    while not large.num_starts:
        small += world.generate([1] * 4, 1)
        world.step()
    passed = sum(sequence.num_starts for sequence in small)
    assert MAX_STEPS_PASSED - 1 <= passed <= MAX_STEPS_PASSED
    assert len(small) > passed + 5
    world.drain()


def test_load_counts_what_waits_and_what_runs():
    scheduler = make(num_blocks=64, budget=8, cached=True)
    first = prompt(20)
    others = [prompt(20, index=i, parent=first) for i in (1, 2)]
    scheduler.add([first, *others])
    scheduler.add([prompt(5, Task.EMBED)])
    load = scheduler.load()
    assert (load.num_waiting[Task.GENERATE], load.waiting_tokens[Task.GENERATE]) == (3, 22)
    assert (load.num_waiting[Task.EMBED], load.waiting_tokens[Task.EMBED]) == (1, 5)
    scheduler.advance(scheduler.schedule())
    load = scheduler.load()
    assert (load.num_running[Task.GENERATE], load.running_tokens[Task.GENERATE]) == (1, 12)
    assert (load.num_waiting[Task.GENERATE], load.waiting_tokens[Task.GENERATE]) == (2, 2)
    assert (load.blocks_used, load.blocks_free, load.blocks_cached) == (2, 62, 0)
    for sequence in (first, *others):
        scheduler.drop(sequence)
    load = scheduler.load()
    assert (load.blocks_used, load.blocks_free, load.blocks_cached) == (0, 64, 2)
    assert load.num_waiting[Task.GENERATE] == load.running_tokens[Task.GENERATE] == 0
    assert Scheduler(None, 8, 8).load().blocks_free == 0
    assert isinstance(first, Sequence)
