"""What an engine turns away when its server drains, and that it answers questions between two steps alone."""

import asyncio
import threading

import pytest

from pyruntime.engine import Engine
from pyruntime.errors import NotReady
from pyruntime.scheduler.blocks import BlockPool
from pyruntime.scheduler.scheduler import Scheduler
from pyruntime.types import Task
from tests.fake_compute import INFO, FakeModel, collect, embed, generate, until

AWAY = NotReady("the server is shutting down", 1.0)


@pytest.fixture
def model():
    return FakeModel()


@pytest.fixture
def engine(model):
    made = Engine(INFO, Scheduler(BlockPool(64, 4), 64, 2), model, model, model)
    yield made
    let_go(model)
    made.close()


def let_go(model):
    model.hold = False
    for _ in range(100):
        model.released.release()


async def test_what_runs_goes_on_and_what_waits_is_turned_away(engine, model):
    model.hold = True
    streams = [engine.generate(generate([place], 9)) for place in (10, 20)]
    await asyncio.to_thread(model.entered.wait)
    while not all(job.has_run for job in engine._loop._jobs):  # the first step may have begun without the second
        model.entered.clear()
        model.released.release()
        await asyncio.to_thread(model.entered.wait)
    queued = engine.generate(generate([30], 5))
    waiting = asyncio.create_task(engine.embed(embed([1])))
    await until(lambda: engine.num_open == 4)
    engine.turn_away(AWAY)
    with pytest.raises(NotReady):
        await engine.embed(embed([2]))
    let_go(model)
    for refused in (collect(queued), waiting):
        with pytest.raises(NotReady, match="shutting down"):
            await refused
    events = [await collect(stream) for stream in streams]
    assert [[event.token_id for event in each] for each in events] == [list(range(11, 20)), list(range(21, 30))]
    await until(lambda: engine.num_open == 0)
    assert engine.load().num_queued_tokens == 0


async def test_a_request_that_has_begun_may_come_with_more(engine):
    """Some calls need several answers of the engine, one after the other, on one ticket."""
    with engine.admit(Task.EMBED) as begun, engine.admit(Task.EMBED) as idle:
        await engine.embed(embed([1, 2]), ticket=begun)
        engine.turn_away(AWAY)
        answers, _ = await engine.embed(embed([3]), ticket=begun)
        assert len(answers) == 1
        with pytest.raises(NotReady):
            await engine.embed(embed([3]), ticket=idle)


async def test_questions_are_answered_between_steps(engine, model):
    answered = threading.Event()
    engine.probe(answered.set)
    assert await asyncio.to_thread(answered.wait, 10)  # while there is nothing to do
    answered.clear()
    model.hold = True
    held = asyncio.create_task(engine.embed(embed([1])))
    await asyncio.to_thread(model.entered.wait)
    engine.probe(answered.set)
    await until(lambda: engine.num_open == 1)
    assert not answered.is_set()
    let_go(model)
    assert await asyncio.to_thread(answered.wait, 10)
    await held
