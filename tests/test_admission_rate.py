"""What is known of how fast a model gets tokens done when its queue waits for the steps of another one too."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from pyruntime.engine import Engine
from pyruntime.scheduler.blocks import BlockPool
from pyruntime.scheduler.scheduler import Scheduler
from pyruntime.step_thread import StepThread
from tests.fake_compute import INFO, FakeModel, embed, until

STEP_TOKENS = 50


class Clock:
    """Moved on the step thread, and by a test while that waits."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


class Timed(FakeModel):
    """Its forward takes a second."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def forward(self, batch):
        super().forward(batch)
        self._clock.now += 1


def engine_of(model: Timed, thread: StepThread, clock: Clock) -> Engine:
    made = Engine(INFO, Scheduler(BlockPool(200, 4), STEP_TOKENS, 32), model, model, model, thread=thread)
    made._admission._clock = clock.monotonic
    return made


@pytest.mark.parametrize("num_engines", [1, 2])
async def test_the_rate_is_that_of_time_that_passes(monkeypatch, num_engines):
    clock = Clock()
    monkeypatch.setattr("pyruntime.step_loop.time", SimpleNamespace(monotonic=clock.monotonic))
    thread = StepThread("shared")
    models = [Timed(clock) for _ in range(num_engines)]
    engines = [engine_of(model, thread, clock) for model in models]
    models[0].hold = True
    calls = [asyncio.create_task(engines[0].embed(embed([1])))]
    await asyncio.to_thread(models[0].entered.wait)
    for engine in engines:
        calls += [asyncio.create_task(engine.embed(embed([7] * STEP_TOKENS))) for _ in range(20)]
    await until(lambda: all(engine.num_open >= 20 for engine in engines))
    models[0].hold = False
    models[0].released.release()
    await asyncio.gather(*calls)
    rates = [engine.load().tokens_per_s for engine in engines]
    assert rates == [pytest.approx(STEP_TOKENS / num_engines, rel=0.2)] * num_engines

    # A queue that is cancelled leaves no gap behind that would count as waiting.
    models[0].hold = True
    models[0].entered.clear()
    calls = [asyncio.create_task(engines[0].embed(embed([7] * STEP_TOKENS))) for _ in range(4)]
    await asyncio.to_thread(models[0].entered.wait)
    await until(lambda: engines[0].num_open == 4)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    models[0].hold = False
    models[0].released.release()
    await until(lambda: engines[0].num_open == 0)
    before = engines[0].load().tokens_per_s
    clock.now += 1000
    for _ in range(2):
        await asyncio.gather(*(engines[0].embed(embed([7] * STEP_TOKENS)) for _ in range(3)))
    assert engines[0].load().tokens_per_s >= 0.9 * before
    for engine in engines:
        engine.close()
