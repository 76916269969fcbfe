"""The step thread with a fake model: results, cancellation, failures, bounds."""

import asyncio

import pytest

from pyruntime.engine import Engine
from pyruntime.errors import ComputeFault, InvalidField, NotReady, Overloaded
from pyruntime.scheduler.blocks import BlockPool
from pyruntime.scheduler.scheduler import Scheduler
from pyruntime.types import FinishReason, ScoreRequest
from tests.fake_compute import INFO, FakeModel, collect, embed, generate, until


@pytest.fixture
def model():
    return FakeModel()


@pytest.fixture
def engine(model):
    made = Engine(INFO, Scheduler(BlockPool(64, 4), 64, 32), model, model, model, max_queue_requests=4)
    yield made
    model.hold = False
    for _ in range(100):
        model.released.release()
    made.close()


async def test_tokens_arrive_in_order_and_the_last_says_why(engine):
    events = await collect(engine.generate(generate([5], 3)))
    assert [e.token_id for e in events] == [6, 7, 8]
    assert [e.finish for e in events] == [None, None, FinishReason.LENGTH]
    assert events[-1].timing.compute_s >= 0


async def test_stop_token_ends_it_but_not_before_the_least_number(engine):
    events = await collect(engine.generate(generate([5], 9, stops=[7])))
    assert [e.token_id for e in events] == [6, 7]
    assert events[-1].finish is FinishReason.STOP
    events = await collect(engine.generate(generate([5], 9, stops=[7, 9], least=2)))
    assert [e.token_id for e in events] == [6, 7, 8, 9]


async def test_continuations_share_the_prompt(engine, model):
    events = await collect(engine.generate(generate(list(range(1, 10)), 2, n=3)))
    assert {i: [e.token_id for e in events if e.index == i] for i in range(3)} == {i: [10, 11] for i in range(3)}
    assert sum(length for batch in model.batches for _, length in batch) == 9 + 1 + 2 * 2


async def test_all_three_tasks_at_once(engine):
    score = ScoreRequest([1, 2], [[3], [4, 5]], [0], True)
    events, (vectors, _), (scores, _) = await asyncio.gather(
        collect(engine.generate(generate([5], 4))), engine.embed(embed([1, 2], [3])), engine.score(score)
    )
    assert len(events) == 4
    assert [v.values for v in vectors] == [[1, 2], [3]]
    assert [s.scores for s in scores] == [[6.0], [12.0]]
    assert [(s.prompt_tokens, s.cached_tokens) for s in scores] == [(3, 0), (4, 2)]
    assert engine.num_blocks_used == 0


async def test_cancelled_generate_stops_within_one_step(engine, model):
    model.hold = True
    stream = engine.generate(generate([5], 100))
    await asyncio.to_thread(model.entered.wait)
    stream.cancel()
    model.hold = False
    model.released.release()
    await until(lambda: engine.num_open == 0)
    assert len(model.batches) == 1
    assert engine.num_blocks_used == 0


async def test_cancelling_the_awaiting_task_stops_the_work(engine, model):
    model.hold = True
    task = asyncio.create_task(engine.embed(embed([1] * 150)))
    await asyncio.to_thread(model.entered.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    model.hold = False
    model.released.release()
    await until(lambda: engine.num_open == 0)
    assert len(model.batches) == 1
    assert engine.num_blocks_used == 0


async def test_one_continuation_can_be_cancelled_alone(engine):
    stream, seen = engine.generate(generate([5], 30, n=2)), []
    async for events in stream:
        seen += events
        if seen[0] in events:
            stream.cancel(1)
            stream.cancel(1)
    assert [e.token_id for e in seen if e.index == 0] == list(range(6, 36))
    assert engine.num_open == 0


async def test_a_failing_step_ends_its_requests_and_the_engine_goes_on(engine, model):
    model.broken = True
    with pytest.raises(ComputeFault, match="RuntimeError"):
        await engine.embed(embed([1]))
    with pytest.raises(ComputeFault):
        await collect(engine.generate(generate([1], 3, n=2)))
    model.broken = False
    vectors, _ = await engine.embed(embed([1]))
    assert vectors[0].values == [1]
    assert (engine.num_open, engine.num_blocks_used) == (0, 0)


async def test_one_bad_row_fails_alone(engine, model):
    model.not_finite = {13}
    vectors, _ = await engine.embed(embed([1], [13], [2]))
    assert [v.error is None for v in vectors] == [True, False, True]
    good, bad = await asyncio.gather(
        collect(engine.generate(generate([5], 3))), collect(engine.generate(generate([13], 3))), return_exceptions=True
    )
    assert len(good) == 3
    assert isinstance(bad, ComputeFault)


async def test_queue_is_bounded_and_says_when_to_retry(engine, model):
    model.hold = True
    streams = [engine.generate(generate([5], 2)) for _ in range(4)]
    with pytest.raises(Overloaded, match="4 requests") as refusal:
        engine.generate(generate([5], 2))
    assert refusal.value.retry_after_s > 0
    model.hold = False
    for _ in range(4):
        model.released.release()
    assert all(len(events) == 2 for events in await asyncio.gather(*map(collect, streams)))


async def test_what_cannot_fit_is_refused_before_any_work(engine, model):
    with pytest.raises(InvalidField, match="201 tokens in all, the model takes 200"):
        engine.generate(generate([5], 200))
    assert model.batches == []


async def test_a_score_whose_bookkeeping_would_be_huge_is_refused(engine, model):
    with pytest.raises(InvalidField, match="items: in all they are 8400000 tokens"):
        await engine.score(ScoreRequest([1], [[2] * 4200] * 2000, [0], True))
    assert model.batches == []


async def test_close_ends_open_requests(model):
    engine = Engine(INFO, Scheduler(BlockPool(64, 4), 64, 32), model, model, model)
    model.hold = True
    stream = engine.generate(generate([5], 100))
    await asyncio.to_thread(model.entered.wait)
    closing = asyncio.create_task(asyncio.to_thread(engine.close))
    await until(lambda: engine.is_closed)
    model.hold = False
    model.released.release()
    with pytest.raises(NotReady):
        await collect(stream)
    await closing
    with pytest.raises(NotReady):
        engine.generate(generate([5], 1))


async def test_a_bug_in_the_bookkeeping_leaves_nobody_waiting(model, caplog):
    class Broken(Scheduler):
        def advance(self, plan):
            raise KeyError("bookkeeping")

    engine, told = Engine(INFO, Broken(BlockPool(64, 4), 64, 32), model, model, model), []

    def listen(reason):
        told.append(reason)
        raise KeyError("so has the listener")

    engine.on_failed = listen
    with pytest.raises(ComputeFault, match="the engine of model fake has failed"):
        await engine.embed(embed([1]))
    await until(lambda: engine.is_closed)
    assert told == ["the engine of model fake has failed"]
    assert "nobody could be told" in caplog.text
    with pytest.raises(NotReady):
        await engine.embed(embed([1]))
    engine.close()
