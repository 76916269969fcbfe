"""The policy, step by step, without tensors."""

import random

import pytest

from pyruntime.scheduler.blocks import BlockPool
from pyruntime.scheduler.scheduler import Scheduler
from pyruntime.scheduler.sequence import Sequence, State
from pyruntime.types import Task
from tests.scheduler.sequences import make, planned, prompt


def test_long_prompt_is_cut_into_chunks_and_decode_rows_stay_in():
    scheduler = make(budget=8)
    stream = prompt(3)
    scheduler.add([stream])
    scheduler.advance(scheduler.schedule())
    scheduler.append_token(stream, 7)
    long = prompt(20)
    scheduler.add([long])
    chunks = []
    for _ in range(3):
        plan = scheduler.schedule()
        counts = dict(planned(plan))
        assert counts[stream] == 1
        assert plan.num_tokens <= 8
        chunks.append(counts[long])
        scheduler.advance(plan)
        scheduler.append_token(stream, 7)
    assert chunks == [7, 7, 6]


def test_a_long_prompt_takes_small_chunks_while_a_stream_runs_and_large_ones_else():
    scheduler = Scheduler(BlockPool(64, 4), 32, 16, max_prompt_tokens_beside=8)
    stream, long = prompt(3), prompt(100)
    scheduler.add([stream])
    scheduler.advance(scheduler.schedule())
    scheduler.append_token(stream, 7)
    scheduler.add([long])
    plan = scheduler.schedule()
    assert planned(plan) == [(stream, 1), (long, 8)]
    scheduler.advance(plan)
    scheduler.append_token(stream, 7)
    plan = scheduler.schedule()
    assert planned(plan) == [(stream, 1), (long, 8)]
    scheduler.advance(plan)
    scheduler.finish(stream)
    assert planned(scheduler.schedule()) == [(long, 32)]


def test_three_tasks_share_one_step():
    scheduler = make()
    sequences = [prompt(3), prompt(5, Task.EMBED), prompt(4, Task.SCORE)]
    for sequence in sequences:
        scheduler.add([sequence])
    assert planned(scheduler.schedule()) == list(zip(sequences, [3, 5, 4], strict=True))


def test_higher_priority_first_then_arrival():
    scheduler = make(budget=6)
    low, high, later = prompt(4), prompt(4, priority=1), prompt(4)
    for sequence in (low, high, later):
        scheduler.add([sequence])
    assert planned(scheduler.schedule()) == [(high, 4), (low, 2)]


def test_children_fork_from_the_prefix_and_copy_its_half_filled_block():
    scheduler = make(block_size=4)
    prefix = Sequence(Task.SCORE, list(range(6)), is_prefix=True, index=-1)
    items = [Sequence(Task.SCORE, [*range(6), 90 + i], index=i, parent=prefix) for i in range(3)]
    scheduler.add([prefix, *items])
    first = scheduler.schedule()
    assert planned(first) == [(prefix, 6)]
    prefix_blocks = list(prefix.blocks)
    scheduler.advance(first)
    second = scheduler.schedule()
    assert planned(second) == [(item, 1) for item in items]
    assert [item.cached_tokens for item in items] == [0, 6, 6]
    assert [source for source, _ in second.block_copies] == [prefix_blocks[1]] * 3
    assert all(item.blocks[0] == prefix_blocks[0] for item in items)
    assert len({item.blocks[1] for item in items}) == 3
    scheduler.advance(second)
    assert prefix.state is State.FINISHED
    for item in items:
        scheduler.finish(item)
    assert scheduler.blocks.num_used == 0


def test_prefix_blocks_are_not_reused_within_the_step_that_copies_them():
    scheduler = make(num_blocks=5, block_size=4)
    prefix = Sequence(Task.SCORE, list(range(6)), is_prefix=True, index=-1)
    item = Sequence(Task.SCORE, list(range(7)), index=0, parent=prefix)
    scheduler.add([prefix, item])
    scheduler.advance(scheduler.schedule())
    other = prompt(8)
    scheduler.add([other])
    source_blocks = set(prefix.blocks)
    plan = scheduler.schedule()
    assert plan.block_copies
    assert not source_blocks & set(other.blocks)


def test_continuations_of_one_prompt_recompute_its_last_token_only():
    scheduler = make(block_size=4)
    first = prompt(9)
    others = [prompt(9, index=i, parent=first) for i in (1, 2)]
    scheduler.add([first, *others])
    scheduler.advance(scheduler.schedule())
    scheduler.append_token(first, 1)
    plan = scheduler.schedule()
    assert planned(plan) == [(first, 1), (others[0], 1), (others[1], 1)]
    assert [s.cached_tokens for s in others] == [8, 8]


def test_first_continuation_may_finish_before_the_others_fork():
    scheduler = make(block_size=4, max_running=1)
    first = prompt(8)
    second = prompt(8, index=1, parent=first)
    scheduler.add([first, second])
    scheduler.advance(scheduler.schedule())
    scheduler.append_token(first, 1)
    scheduler.finish(first)
    assert first.state is State.HOLDING
    plan = scheduler.schedule()
    assert planned(plan) == [(second, 1)]
    scheduler.advance(plan)
    scheduler.finish(second)
    assert scheduler.blocks.num_used == 0


def test_out_of_blocks_preempts_the_youngest_and_recomputes_it():
    scheduler = make(num_blocks=4, block_size=4)
    old, young = prompt(7), prompt(7)
    scheduler.add([old])
    scheduler.add([young])
    scheduler.advance(scheduler.schedule())
    for sequence in (old, young):
        scheduler.append_token(sequence, 1)
    scheduler.advance(scheduler.schedule())
    for sequence in (old, young):
        scheduler.append_token(sequence, 2)
    plan = scheduler.schedule()
    assert planned(plan) == [(old, 1)]
    assert (young.state, young.num_computed, len(young)) == (State.WAITING, 0, 9)
    scheduler.advance(plan)
    scheduler.finish(old)
    assert planned(scheduler.schedule()) == [(young, 9)]


def test_held_prefixes_give_way_when_nothing_else_can_run():
    scheduler = make(num_blocks=4, block_size=4)
    prefix = Sequence(Task.SCORE, list(range(10)), is_prefix=True, index=-1)
    item = Sequence(Task.SCORE, list(range(12)), index=0, parent=prefix)
    urgent = prompt(15, priority=5)
    scheduler.add([prefix, item])
    scheduler.advance(scheduler.schedule())
    scheduler.add([urgent])
    plan = scheduler.schedule()
    assert planned(plan) == [(urgent, 15)]
    scheduler.advance(plan)
    scheduler.finish(urgent)
    assert planned(scheduler.schedule()) == [(item, 12)]


def test_encoder_sequences_run_whole_even_beyond_the_budget():
    scheduler = Scheduler(None, 10, 16)
    small, large = prompt(4, Task.EMBED), prompt(25, Task.EMBED)
    scheduler.add([small])
    scheduler.add([large])
    first = scheduler.schedule()
    assert planned(first) == [(small, 4)]
    scheduler.advance(first)
    scheduler.finish(small)
    assert planned(scheduler.schedule()) == [(large, 25)]


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_random_life_loses_no_block_and_no_request(seed, cached):
    """Random arrivals, forks, cancels and finishes in a pool that is too small for all of them."""
    rng = random.Random(seed)
    blocks, budget = rng.choice([9, 16, 40]), rng.choice([3, 16])
    scheduler = make(num_blocks=blocks, block_size=4, budget=budget, max_running=6, cached=cached)
    requests, target, steps = [], {}, 0
    while (steps < 150 or scheduler.has_work) and steps < 20_000:
        steps += 1
        if steps < 150 and rng.random() < 0.4:
            requests.append(_random_request(rng, scheduler, target))
        if requests and rng.random() < 0.05:
            for sequence in rng.choice(requests):
                scheduler.drop(sequence)
        plan = scheduler.schedule()
        assert plan.entries or not scheduler.has_work
        decode = sum(1 for s, _ in plan.entries if s.is_decoding)
        assert plan.num_tokens <= max(scheduler.max_batch_tokens, decode)
        for sequence, count in plan.entries:
            assert len(sequence.blocks) * 4 >= sequence.num_computed + count
        reading = [s for s, n in plan.entries if s.num_computed + n == len(s) and not s.is_prefix]
        scheduler.advance(plan)
        for sequence in reading:
            if sequence.is_prefill_only:
                scheduler.finish(sequence)
                continue
            scheduler.append_token(sequence, 1)
            if sequence.num_generated >= target[sequence]:
                scheduler.finish(sequence)
    assert not scheduler.has_work
    assert all(s.state is State.FINISHED for request in requests for s in request)
    assert scheduler.blocks.num_used == 0


def _random_request(rng, scheduler, target):
    length = rng.randrange(1, 17)
    if rng.random() < 0.5:
        first = prompt(length)
        request = [first] + [prompt(length, index=i, parent=first) for i in range(1, rng.randrange(1, 4))]
        target.update({sequence: rng.randrange(1, 12) for sequence in request})
    else:
        prefix = Sequence(Task.SCORE, list(range(length)), is_prefix=True, index=-1)
        items = [
            Sequence(Task.SCORE, list(range(length + rng.randrange(1, 6))), index=i, parent=prefix) for i in range(3)
        ]
        request = [prefix, *items]
    scheduler.add(request)
    return request
