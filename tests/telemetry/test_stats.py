"""What engines count about themselves, against counts by hand and numpy's quantiles."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from pyruntime.engine import Engine
from pyruntime.scheduler.blocks import BlockPool
from pyruntime.scheduler.prefix_cache import PrefixCache
from pyruntime.scheduler.scheduler import Scheduler
from pyruntime.scheduler.sequence import Sequence
from pyruntime.stats import STEP_BOUNDS, TOKEN_BOUNDS, WAIT_BOUNDS, EngineStats, Histogram, Pace
from pyruntime.types import ScoreRequest, Task
from tests.fake_compute import INFO, FakeModel, collect, embed, generate, until


@pytest.mark.parametrize("bounds", [WAIT_BOUNDS, STEP_BOUNDS, TOKEN_BOUNDS])
def test_buckets_hold_what_is_at_most_their_bound(bounds):
    histogram = Histogram(bounds)
    values = np.random.default_rng(1).lognormal(-2, 3, 2000)
    for value in [*values, *bounds]:
        histogram.observe(value)
    reading = histogram.read()
    every = np.array([*values, *bounds])
    assert [bound for bound, _ in reading.published()] == [*bounds, float("inf")]
    for bound, count in reading.published():
        assert count == (every <= bound).sum()
    assert reading.num_observed == len(every)
    assert reading.total == pytest.approx(every.sum())


@pytest.mark.parametrize("share", [0.5, 0.95])
def test_quantiles_are_close_to_the_true_ones(share):
    histogram = Histogram(WAIT_BOUNDS)
    values = np.random.default_rng(2).lognormal(-3, 1.5, 5000)
    for value in values:
        histogram.observe(value)
    assert histogram.read().quantile(share) == pytest.approx(np.quantile(values, share), rel=0.1)


def test_quantiles_below_the_first_published_bound():
    histogram = Histogram(WAIT_BOUNDS)
    histogram.observe(WAIT_BOUNDS[0] / 5, 10)
    assert histogram.read().quantile(0.5) == pytest.approx(WAIT_BOUNDS[0] / 5, rel=0.5)
    assert histogram.read().published()[0] == (WAIT_BOUNDS[0], 10)


def test_quantiles_at_the_ends():
    histogram = Histogram(WAIT_BOUNDS)
    assert histogram.read().quantile(0.5) is None
    histogram.observe(1e9, 3)
    assert histogram.read().quantile(0.5) == WAIT_BOUNDS[-1]
    assert histogram.read().total == 3e9


def test_a_later_reading_less_an_earlier_one_is_what_came_between():
    histogram = Histogram(WAIT_BOUNDS)
    histogram.observe(0.2, 5)
    before = histogram.read()
    histogram.observe(2.0, 2)
    fresh = histogram.read().since(before)
    assert (fresh.num_observed, fresh.total) == (2, 4.0)
    assert 1 < fresh.quantile(0.5) <= 2.5


class Site:
    """An engine with a cache of blocks of four, and the fake model behind it."""

    def __init__(self, **options):
        self.model = FakeModel()
        pool = BlockPool(100, 4)
        scheduler = Scheduler(pool, 64, 16, prefix_cache=PrefixCache(pool))
        self.engine = Engine(INFO, scheduler, self.model, self.model, self.model, **options)
        self.stats = self.engine.stats

    @property
    def counts(self):
        stats = self.stats
        return {
            "first": stats.first_token.read().num_observed,
            "gaps": stats.token_gap.read().num_observed,
            "drawn": stats.num_drawn_tokens,
            "queued": {task.value: histogram.read().num_observed for task, histogram in stats.queue.items()},
            "whole": {task.value: histogram.read().num_observed for task, histogram in stats.whole.items()},
            "prompt": {task.value: count for task, count in stats.prompt_tokens.items()},
            "hits": {task.value: count for task, count in stats.hit_tokens.items()},
            "computed": {task.value: count for task, count in stats.computed_tokens.items()},
        }


@pytest.fixture
def site():
    made = Site()
    yield made
    made.engine.close()


def only(**counts):
    return {task.value: 0 for task in Task} | counts


async def test_a_stream(site):
    await collect(site.engine.generate(generate(list(range(10)), 5)))
    counts = site.counts
    assert (counts["first"], counts["gaps"], counts["drawn"]) == (1, 4, 5)
    assert counts["queued"] == counts["whole"] == only(generate=1)
    # Ten of the prompt, then each drawn token but the last.
    assert counts["prompt"] == only(generate=10)
    assert counts["computed"] == only(generate=14)
    assert site.stats.step.read().num_observed == 5 == site.stats.step_tokens.read().num_observed
    assert site.stats.step_tokens.read().total == 14


async def test_continuations_of_one_prompt(site):
    await collect(site.engine.generate(generate(list(range(10)), 5, n=3)))
    counts = site.counts
    assert (counts["first"], counts["gaps"], counts["drawn"]) == (1, 3 * 4, 3 * 5)
    assert counts["queued"] == counts["whole"] == only(generate=1)
    assert counts["hits"] == only()


async def test_what_the_prefix_cache_held(site):
    for _ in range(2):
        await collect(site.engine.generate(generate(list(range(10)), 1)))
    assert site.counts["prompt"] == only(generate=20)
    assert site.counts["hits"] == only(generate=8)  # two full blocks
    assert site.counts["computed"] == only(generate=12)


async def test_batches_of_other_tasks(site):
    await site.engine.embed(embed([1, 2, 3], [4, 5]))
    await site.engine.score(ScoreRequest([1, 2, 3, 4], [[5], [6, 7]], [0], True))
    counts = site.counts
    assert counts["whole"] == counts["queued"] == only(embed=1, score=1)
    assert counts["prompt"] == only(embed=5, score=4 + 1 + 2)
    assert counts["computed"] == only(embed=5, score=4 + 1 + 2)
    assert (counts["first"], counts["drawn"]) == (0, 0)


async def test_steps_of_several_tasks_are_told_apart(site):
    site.model.hold = True
    first = asyncio.create_task(collect(site.engine.generate(generate([1, 2], 3))))
    await until(site.model.entered.is_set)
    other = asyncio.create_task(site.engine.embed(embed([1, 2, 3])))
    await until(lambda: site.engine.num_open == 2)
    site.model.hold = False
    site.model.released.release()
    await asyncio.gather(first, other)
    assert site.stats.num_mixed_steps == 1


async def test_the_time_that_a_client_takes_is_not_the_models():
    site = Site(stream_buffer_tokens=2)
    stream = site.engine.generate(generate([1], 12))
    await until(lambda: site.engine.load().scheduler.num_paused == 1)
    paused = site.counts
    assert site.stats.num_pauses == 1
    assert paused["gaps"] == paused["drawn"] - 1
    assert len(await collect(stream)) == 12
    counts = site.counts
    assert counts["drawn"] == 12
    # Each pause takes one gap out.
    assert counts["gaps"] == 12 - 1 - site.stats.num_pauses
    site.engine.close()


async def test_requests_that_a_forward_fails(site):
    site.model.broken = True
    with pytest.raises(Exception, match="the forward failed"):
        await site.engine.embed(embed([1]))
    assert site.stats.num_failed == 1
    assert site.counts["whole"] == only()


async def test_a_cancelled_request_has_no_end(site):
    site.model.hold = True
    stream = site.engine.generate(generate([1], 50))
    await until(site.model.entered.is_set)
    stream.cancel()
    site.model.hold = False
    site.model.released.release()
    await until(lambda: site.engine.num_open == 0)
    assert site.counts["whole"] == only()


async def test_admission_counts_into_the_first_token(site):
    ticket = site.engine.admit(Task.GENERATE)
    ticket.taken_at -= 100.0  # as if tokenising had taken so long
    stream = site.engine.generate(generate([1], 2), ticket=ticket)
    await collect(stream)
    ticket.release()
    assert 100 <= site.stats.first_token.read().total < 200
    assert 100 <= site.stats.whole[Task.GENERATE].read().total < 200
    assert site.stats.queue[Task.GENERATE].read().total < 100


def test_tokens_of_one_step_share_its_time():
    stats, job = EngineStats(), SimpleNamespace(pace=Pace(), arrived_at=10.0)
    stream = Sequence(Task.GENERATE, [1, 2])
    for number, now in ((1, 12.0), (3, 12.6), (0, 13.0), (1, 13.2)):
        stream.token_ids += [7] * number
        stats.note_tokens(job, stream, now)
    assert stats.first_token.read().total == 2.0
    gaps = stats.token_gap.read()
    # Three of 0.2 s in the second step; none in the third, which drew nothing; then 0.6 s since the second.
    assert (gaps.num_observed, gaps.total) == (4, pytest.approx(3 * 0.2 + 0.6))
    assert stats.num_drawn_tokens == 5


async def test_sequences_that_give_up_their_blocks_are_counted():
    model = FakeModel()
    engine = Engine(INFO, Scheduler(BlockPool(6, 4), 64, 16), model, model, model)
    streams = [engine.generate(generate([start] * 4, 12)) for start in (1, 50)]
    events = await asyncio.gather(*(collect(stream) for stream in streams))
    assert [len(each) for each in events] == [12, 12]
    await until(lambda: engine.load().scheduler.num_set_back >= 1)  # published a moment later
    # What is computed again is no prompt token again, and no token is drawn twice.
    stats = engine.stats
    assert (stats.prompt_tokens[Task.GENERATE], stats.num_drawn_tokens) == (8, 24)
    assert stats.computed_tokens[Task.GENERATE] > 8 + 2 * 11
    engine.close()
