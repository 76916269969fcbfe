"""Forwards that raise: only the request at fault fails, a lost device ends the engine in order."""

import asyncio
import logging

import pytest

from pyruntime.engine import Engine
from pyruntime.errors import ComputeFault, NotReady
from pyruntime.scheduler.blocks import BlockPool
from pyruntime.scheduler.prefix_cache import PrefixCache
from pyruntime.scheduler.scheduler import Scheduler
from pyruntime.types import ScoreRequest
from tests.fake_compute import INFO, FakeModel, collect, embed, generate, until

POISON = 99


class Poisonable(FakeModel):
    """Raises ``error`` for every batch that holds a sequence with the token ``POISON``."""

    def __init__(self):
        super().__init__()
        self.error = RuntimeError("index out of range")

    def forward(self, batch):
        hidden = super().forward(batch)
        if any(POISON in rows.sequence.token_ids for rows in batch.rows):
            raise self.error
        return hidden


@pytest.fixture
def model():
    return Poisonable()


@pytest.fixture
def engine(model):
    pool = BlockPool(64, 4)
    made = Engine(INFO, Scheduler(pool, 64, 32, prefix_cache=PrefixCache(pool)), model, model, model)
    yield made
    made.close()


async def held_together(engine, model, *work):
    """Starts ``work`` so that all of it is in the next step; returns the outcomes."""
    model.hold = True
    first = asyncio.create_task(engine.embed(embed([1])))
    await asyncio.to_thread(model.entered.wait)
    tasks = [asyncio.ensure_future(each) for each in work]
    await until(lambda: engine.num_open == 1 + len(work))
    model.hold = False
    model.released.release()
    await first
    return await asyncio.gather(*tasks, return_exceptions=True)


async def test_the_culprit_fails_alone(engine, model, caplog):
    streams = (collect(engine.generate(generate([token], 20, n=2))) for token in (5, 6))
    score = ScoreRequest([1, 2, 3], [[4], [5]], [0], True)
    *good, bad, scored = await held_together(
        engine, model, *streams, engine.embed(embed([7] * 9)), engine.embed(embed([8], [POISON])), engine.score(score)
    )
    assert isinstance(bad, ComputeFault)
    assert bad.message == "the forward failed: RuntimeError"
    first, second, (vectors, _) = good
    assert sorted(e.token_id for e in first if e.index == 1) == list(range(6, 26))
    assert sorted(e.token_id for e in second if e.index == 0) == list(range(7, 27))
    assert vectors[0].values == [7] * 9
    assert [each.scores for each in scored[0]] == [[10.0], [11.0]]
    await until(lambda: engine.num_open == 0)
    assert (engine.num_blocks_used, engine.load().num_queued_tokens) == (0, 0)
    assert "index out of range" in caplog.text


async def test_a_stream_that_turns_bad_ends_while_others_go_on(engine, model):
    others = [collect(engine.generate(generate([token], 60))) for token in (1, 20, 100)]
    bad = engine.generate(generate([90], 60))
    *good, failed = await asyncio.gather(*others, collect(bad), return_exceptions=True)
    assert isinstance(failed, ComputeFault)
    assert [events[-1].token_id for events in good[1:]] == [80, 160]
    assert good[0][-1].token_id == 61
    assert engine.num_blocks_used == 0


async def test_what_a_failed_step_computed_is_not_taken_for_a_prefix(engine, model):
    prompt = [3] * 12 + [POISON] + [3] * 3
    with pytest.raises(ComputeFault):
        await engine.embed(embed(prompt))
    assert engine.load().scheduler.blocks_cached == 0


async def test_a_lost_device_ends_the_engine_in_order(model, caplog):
    engine = Engine(INFO, Scheduler(BlockPool(64, 4), 64, 32), model, model, model)
    told = []
    engine.on_failed = lambda reason: told.append((reason, task.done()))
    engine.on_device_lost = lambda reason: told.append((reason, engine.num_open))
    model.error = RuntimeError("CUDA error: device-side assert triggered")
    with caplog.at_level(logging.CRITICAL):
        task = asyncio.create_task(engine.embed(embed([POISON])))
        with pytest.raises(ComputeFault, match="the device of model fake has failed"):
            await task
        await until(lambda: len(told) == 2)
    assert told == [
        ("the device of model fake has failed", False),
        ("cpu: RuntimeError: CUDA error: device-side assert triggered", 0),
    ]
    assert "the step thread of model fake ended" in caplog.text
    assert len(model.batches) == 1
    with pytest.raises(NotReady):
        await engine.embed(embed([1]))
    engine.close()


async def test_a_forward_that_hangs_can_be_seen(engine, model):
    assert engine.seconds_in_step == 0
    model.hold = True
    held = asyncio.create_task(engine.embed(embed([1])))
    await asyncio.to_thread(model.entered.wait)
    before = engine.seconds_in_step
    await until(lambda: engine.load().seconds_in_step > before)
    model.released.release()
    await held
    await until(lambda: engine.seconds_in_step == 0)


async def test_a_row_that_was_not_finite_leaves_nothing_for_later_requests(engine, model):
    """A fault that passes must not live on in the prefix cache."""
    prompts = [[7] * 13, [8] * 13, [9] * 13]
    model.not_finite = {7, 8, 9}
    with pytest.raises(ComputeFault):
        await collect(engine.generate(generate(prompts[0], 3)))
    await engine.score(ScoreRequest(prompts[1], [[1], [2]], [0], True))
    await engine.embed(embed(prompts[2]))
    model.not_finite = set()
    events = await collect(engine.generate(generate(prompts[0], 3)))
    (scored,), _ = await engine.score(ScoreRequest(prompts[1], [[1]], [0], True))
    (embedded,), _ = await engine.embed(embed(prompts[2]))
    assert [events[0].cached_tokens, scored.cached_tokens, embedded.cached_tokens] == [0, 0, 0]
