"""Steps that are over before another thread would have begun them: where they run, and where not."""

import asyncio
import threading

import pytest

from pyruntime.engine import QUICK_S, Engine
from pyruntime.errors import ComputeFault, NotReady
from pyruntime.scheduler.scheduler import Scheduler
from tests.fake_compute import INFO, FakeModel, embed, generate, until


class Threads(FakeModel):
    """Remembers where its forwards ran."""

    def __init__(self):
        super().__init__()
        self.ran_on = []

    def forward(self, batch):
        self.ran_on.append(threading.current_thread())
        return super().forward(batch)

    def is_here(self):
        """Of each forward so far, whether this thread ran it."""
        return [each is threading.current_thread() for each in self.ran_on]


@pytest.fixture
def model():
    return Threads()


@pytest.fixture
def engine(model):
    made = Engine(INFO, Scheduler(None, 64, 32), model, model, model, lends_steps=True)
    yield made
    model.hold = False
    model.released.release(100)
    made.close()


def knows_quick_steps(engine, seconds=QUICK_S / 2, num_tokens=2):
    engine.stats.least_s[num_tokens.bit_length()] = seconds


async def vectors(engine, *inputs, at_once=True):
    results, _ = await engine.embed(embed(*inputs), at_once=at_once)
    return [each.values for each in results]


async def settled(engine):
    """Once the step thread has nothing to do, which is then soon asleep."""
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()
    engine.probe(lambda: loop.call_soon_threadsafe(asked.set))
    await asked.wait()


async def until_here(engine, model):
    """Requests that ask for it, until one has run on this thread: the step thread may still be on its way to sleep."""
    while not any(model.is_here()):
        assert await vectors(engine, [1, 2]) == [[1, 2]]


async def test_a_quick_step_runs_on_the_calling_thread(engine, model):
    knows_quick_steps(engine)
    await settled(engine)
    await until_here(engine, model)
    assert engine.num_open == 0
    assert engine.load().num_requests == 0
    assert await vectors(engine, [1, 2], at_once=False) == [[1, 2]]
    assert not model.is_here()[-1]


@pytest.mark.parametrize("seconds", [None, QUICK_S * 1.01])
async def test_steps_that_take_long_or_are_not_known_run_on_the_step_thread(engine, model, seconds):
    if seconds is not None:
        knows_quick_steps(engine, seconds)
    knows_quick_steps(engine, num_tokens=8)
    assert await vectors(engine, [1, 2]) == [[1, 2]]
    assert model.is_here() == [False]


async def test_it_is_learnt_from_the_steps_before(engine, model):
    for _ in range(100):
        await vectors(engine, [1, 2])
    assert engine.stats.least_step_s(3) == engine.stats.least_step_s(2) < QUICK_S
    await until_here(engine, model)
    assert not model.is_here()[0]


async def test_an_engine_without_leave_runs_all_steps_on_its_thread(model):
    engine = Engine(INFO, Scheduler(None, 64, 32), model, model, model)
    knows_quick_steps(engine)
    await settled(engine)
    assert await vectors(engine, [1, 2]) == [[1, 2]]
    assert model.is_here() == [False]
    engine.close()


async def test_what_comes_beside_an_open_request_goes_the_usual_way(engine, model):
    model.hold = True
    first = asyncio.ensure_future(vectors(engine, [5, 6], at_once=False))
    await asyncio.to_thread(model.entered.wait)
    knows_quick_steps(engine)
    second = asyncio.ensure_future(vectors(engine, [1, 2]))
    await until(lambda: engine.num_open == 2)
    model.hold = False
    model.released.release()
    assert await asyncio.gather(first, second) == [[[5, 6]], [[1, 2]]]
    assert model.is_here() == [False, False]


async def test_a_step_that_fails_at_once_fails_its_request_alone(engine, model):
    knows_quick_steps(engine)
    await until_here(engine, model)
    model.broken = True
    with pytest.raises(ComputeFault):
        await vectors(engine, [1, 2])
    model.broken = False
    assert await vectors(engine, [1, 2]) == [[1, 2]]
    assert engine.num_open == 0


async def test_a_lost_device_ends_the_engine_from_whichever_thread(model):
    engine = Engine(
        INFO,
        Scheduler(None, 64, 32),
        model,
        model,
        model,
        lends_steps=True,
        fatal=lambda error: True,
    )
    told = []
    engine.on_failed = told.append
    engine.on_device_lost = told.append
    knows_quick_steps(engine)
    await until_here(engine, model)
    model.broken = True
    with pytest.raises(ComputeFault):
        await vectors(engine, [1, 2])
    assert len(told) == 2
    assert engine.is_closed
    with pytest.raises(NotReady):
        await vectors(engine, [1, 2])
    engine.close()


async def test_streams_run_on_the_step_thread_as_ever(engine, model):
    knows_quick_steps(engine)
    stream = engine.generate(generate([1, 2], 3))
    assert [event.token_id async for events in stream for event in events] == [3, 4, 5]
    assert not any(model.is_here())
