"""Deadlines, cancellation in every phase, and clients that read slowly, on the step thread with a fake model."""

import asyncio
import gc
import time

import pytest

from pyruntime.engine import Engine
from pyruntime.errors import DeadlinePassed, InvalidField, NotReady, Overloaded
from pyruntime.jobs.batch import EmbedJob
from pyruntime.scheduler.blocks import BlockPool
from pyruntime.scheduler.scheduler import Scheduler
from pyruntime.types import Task
from tests.fake_compute import INFO, FakeModel, collect, embed, generate, until

BUFFER = 8


@pytest.fixture
def model():
    return FakeModel()


@pytest.fixture
def engine(model):
    scheduler = Scheduler(BlockPool(64, 4), 64, 32)
    made = Engine(INFO, scheduler, model, model, model, stream_buffer_tokens=BUFFER, max_queue_tokens=200)
    yield made
    let_go(model)
    made.close()


def let_go(model):
    model.hold = False
    for _ in range(100):
        model.released.release()


async def hold_a_step(engine, model):
    """Returns once the step thread is inside a forward, which lasts until ``let_go``."""
    model.hold = True
    held = asyncio.create_task(engine.embed(embed([1])))
    await asyncio.to_thread(model.entered.wait)
    return held


async def freed(engine):
    await until(lambda: engine.num_open == 0)
    load = engine.load()
    assert (load.num_requests, load.num_queued_tokens, engine.num_blocks_used) == (0, 0, 0)


# -- cancellation ---------------------------------------------------------------------------------


async def test_cancelled_while_queued_it_never_runs(engine, model):
    held = await hold_a_step(engine, model)
    waiting = asyncio.create_task(engine.embed(embed([7] * 20, [7] * 30)))
    await until(lambda: engine.num_open == 2)
    assert engine.load().num_queued_tokens == 51
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    let_go(model)
    await held
    await freed(engine)
    assert model.batches == [[(Task.EMBED, 1)]]


async def test_cancelled_between_two_chunks_of_its_prompt(engine, model):
    model.hold = True
    stream = engine.generate(generate([5] * 150, 10))
    await asyncio.to_thread(model.entered.wait)
    model.entered.clear()
    model.released.release()
    await asyncio.to_thread(model.entered.wait)  # in the second chunk
    assert engine.load().num_queued_tokens == 150 - 64
    stream.cancel()
    let_go(model)
    await freed(engine)
    assert len(model.batches) == 2


async def test_cancelled_while_its_client_reads_nothing(engine):
    stream = engine.generate(generate([5], 150, n=2))
    await until(lambda: engine.load().scheduler.num_paused == 2)
    assert engine.num_blocks_used > 0
    stream.cancel()
    await freed(engine)


async def test_a_ticket_is_a_place_until_it_is_given_back(model):
    engine = Engine(INFO, Scheduler(BlockPool(64, 4), 64, 32), model, model, model, max_queue_requests=1)
    with engine.admit(Task.EMBED, num_bytes=400) as ticket:
        assert engine.load().num_queued_tokens > 0
        with pytest.raises(Overloaded, match="1 requests are open"):
            await engine.embed(embed([1]))
        for _ in range(3):  # several calls of the engine may answer one request
            await engine.embed(embed([1], [2, 3]), ticket=ticket)
        with pytest.raises(InvalidField):
            await engine.embed(embed([1] * 201), ticket=ticket)
    await freed(engine)
    await engine.embed(embed([1]))
    engine.close()
    with pytest.raises(NotReady):
        engine.admit(Task.EMBED)


async def test_tokens_are_bounded_when_they_are_known(engine, model):
    held = await hold_a_step(engine, model)
    waiting = asyncio.create_task(engine.embed(embed([7] * 150)))
    await until(lambda: engine.num_open == 2)
    with engine.admit(Task.EMBED, num_bytes=200) as ticket, pytest.raises(Overloaded, match="151 tokens wait"):
        await engine.embed(embed([1] * 50), ticket=ticket)
    with pytest.raises(Overloaded, match="151 tokens wait; allowed with this request's 50: 200"):
        await engine.embed(embed([1] * 50))
    let_go(model)
    await asyncio.gather(held, waiting)
    await freed(engine)


# -- deadlines ------------------------------------------------------------------------------------


async def test_a_deadline_that_passes_in_the_queue(engine, model):
    held = await hold_a_step(engine, model)
    deadline = time.monotonic() + 0.3
    waiting = asyncio.create_task(engine.embed(embed([7] * 20), deadline=deadline))
    on_time = asyncio.create_task(engine.embed(embed([8]), deadline=deadline + 1000))
    await until(lambda: time.monotonic() > deadline)
    let_go(model)
    with pytest.raises(DeadlinePassed, match="before the answer was ready"):
        await waiting
    await asyncio.gather(held, on_time)
    await freed(engine)
    assert (Task.EMBED, 20) not in [rows for batch in model.batches for rows in batch]


async def test_a_deadline_that_passes_between_two_steps(engine, model):
    model.hold = True
    deadline = time.monotonic() + 0.3
    stream = engine.generate(generate([5], 100, n=2), deadline=deadline)
    await asyncio.to_thread(model.entered.wait)
    await until(lambda: time.monotonic() > deadline)
    let_go(model)
    with pytest.raises(DeadlinePassed):
        await collect(stream)
    await freed(engine)
    assert len(model.batches) == 1


async def test_a_deadline_wakes_an_engine_that_has_nothing_to_run(engine):
    stream = engine.generate(generate([5], 150), deadline=time.monotonic() + 0.3)
    await until(lambda: engine.load().scheduler.num_paused == 1 or engine.num_open == 0)
    await freed(engine)
    with pytest.raises(DeadlinePassed):
        await collect(stream)


async def test_a_deadline_that_cannot_be_met_is_refused_at_once(engine, model):
    for _ in range(20):
        engine._admission.note(10, 1, 0.1, left_some=True)
    assert engine.load().tokens_per_s == pytest.approx(100)
    held = await hold_a_step(engine, model)
    waiting = asyncio.create_task(engine.embed(embed([7] * 149)))
    await until(lambda: engine.num_open == 2)
    with pytest.raises(DeadlinePassed, match="150 tokens come first, at 100 a second"):
        await engine.embed(embed([1]), deadline=time.monotonic() + 1)
    assert engine.num_open == 2
    let_go(model)
    await asyncio.gather(held, waiting)
    await freed(engine)


async def test_deadlines_of_requests_that_ended_are_forgotten(engine):
    gc.collect()
    left = {id(each) for each in gc.get_objects() if type(each) is EmbedJob}  # by other tests
    deadline = time.monotonic() + 1000
    for _ in range(300):
        await engine.embed(embed([1]), deadline=deadline)
    assert len(engine._loop._deadlines) < 100
    gc.collect()
    # Nor are their results kept.
    assert sum(type(each) is EmbedJob and id(each) not in left for each in gc.get_objects()) <= 1


# -- slow clients ---------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 3])
async def test_a_client_that_does_not_read_pauses_its_own_stream_alone(engine, n):
    slow = engine.generate(generate([5], 150, n=n))
    await until(lambda: engine.load().scheduler.num_paused == n)
    fast = await collect(engine.generate(generate([9], 150)))
    assert [event.token_id for event in fast] == list(range(10, 160))
    assert len(slow._job.inbox._events) <= (BUFFER + 2) * n
    events = await collect(slow)
    for index in range(n):
        assert [event.token_id for event in events if event.index == index] == list(range(6, 156))
    await freed(engine)


async def test_a_paused_stream_gives_its_blocks_to_those_that_need_them(engine):
    slow = engine.generate(generate([5] * 100, 90))
    await until(lambda: engine.load().scheduler.num_paused == 1)
    held_by_slow = engine.num_blocks_used
    assert held_by_slow >= 25
    results, _ = await engine.embed(embed([2] * 190, [3] * 190, [4] * 190))
    assert [result.prompt_tokens for result in results] == [190] * 3
    assert [event.token_id for event in await collect(slow)] == list(range(6, 96))
    await freed(engine)


async def test_a_continuation_can_be_stopped_while_the_stream_is_paused(engine):
    slow = engine.generate(generate([5], 150, n=2))
    await until(lambda: engine.load().scheduler.num_paused == 2)
    slow.cancel(1)
    await until(lambda: engine.load().scheduler.num_paused == 1)
    events = [event for event in await collect(slow) if event.index == 0]
    assert len(events) == 150
    await freed(engine)
