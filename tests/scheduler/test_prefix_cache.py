"""Blocks of earlier prompts for later ones."""

from pyruntime.scheduler.sequence import Sequence, State
from pyruntime.types import Task
from tests.scheduler.sequences import make, prompt


def run_alone(scheduler, sequence):
    scheduler.add([sequence])
    while sequence.state is not State.FINISHED:
        plan = scheduler.schedule()
        scheduler.advance(plan)
        if sequence.num_remaining == 0:
            scheduler.finish(sequence)


def test_a_later_prompt_takes_the_full_blocks_of_an_earlier_one():
    scheduler = make(cached=True)
    first, same, longer, other = prompt(10), prompt(10), prompt(14), Sequence(Task.GENERATE, [9, *range(1, 10)])
    for sequence, cached in ((first, 0), (same, 8), (longer, 8), (other, 0)):
        run_alone(scheduler, sequence)
        assert sequence.cached_tokens == cached
    assert scheduler.blocks.num_used == 0


def test_the_last_token_is_always_computed():
    scheduler = make(cached=True)
    for cached in (0, 4):
        sequence = prompt(8)
        run_alone(scheduler, sequence)
        assert sequence.cached_tokens == cached


def test_pooling_over_all_rows_takes_nothing_from_the_cache_and_leaves_nothing():
    scheduler = make(cached=True)
    for _ in range(2):
        sequence = prompt(8, Task.EMBED, reuses_prefix=False)
        run_alone(scheduler, sequence)
        assert sequence.cached_tokens == 0
    assert len(scheduler.prefix_cache) == 0


def test_cached_blocks_give_way_the_longest_idle_first_and_ends_before_beginnings():
    scheduler = make(num_blocks=7, cached=True)
    old, young, wide = list(range(9)), list(range(50, 59)), list(range(90, 106))
    for ids in (old, young, wide):  # the last needs four blocks: three plain ones and one of old's
        run_alone(scheduler, Sequence(Task.GENERATE, list(ids)))
    known = [len(scheduler.prefix_cache.match(ids, len(ids))[1]) for ids in (old, young, wide)]
    assert known == [1, 2, 4]


def test_a_shared_query_counts_what_an_earlier_request_left():
    scheduler = make(cached=True)
    for cached in ([0, 6], [4, 6]):
        prefix = Sequence(Task.SCORE, list(range(6)), is_prefix=True, index=-1)
        items = [Sequence(Task.SCORE, [*range(6), 90 + i], index=i, parent=prefix) for i in range(2)]
        scheduler.add([prefix, *items])
        while scheduler.has_work:
            plan = scheduler.schedule()
            scheduler.advance(plan)
            for sequence, _ in plan.entries:
                if sequence.num_remaining == 0 and not sequence.is_prefix:
                    scheduler.finish(sequence)
        assert [item.cached_tokens for item in items] == cached
    assert scheduler.blocks.num_used == 0


def test_blocks_of_a_result_that_is_not_to_be_trusted_are_found_no_more():
    scheduler = make(cached=True)
    good, bad, third = prompt(12), prompt(20), prompt(20)
    other = list(range(50, 59))
    run_alone(scheduler, good)
    run_alone(scheduler, Sequence(Task.GENERATE, list(other)))
    scheduler.add([bad])
    while bad.num_remaining:
        scheduler.advance(scheduler.schedule())
    assert bad.cached_tokens == 12  # so what it found may be what was wrong
    scheduler.distrust(bad)
    scheduler.finish(bad)
    run_alone(scheduler, third)
    assert third.cached_tokens == 0
    assert len(scheduler.prefix_cache.match(other, len(other))[1]) == 2
    assert scheduler.blocks.num_used == 0
    assert scheduler.blocks.num_cached == len(scheduler.prefix_cache)
