"""Constraints that take long to follow: aside of the steps, where no other stream waits for them."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from pyruntime.engine import Engine
from pyruntime.errors import InvalidField
from pyruntime.scheduler.blocks import BlockPool
from pyruntime.scheduler.scheduler import Scheduler
from pyruntime.types import FinishReason
from tests.fake_compute import INFO, FakeModel, embed, generate, until

BUFFER = 8
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


class Slow:
    """A constraint whose every token takes until the test says so. ``ends``: the token behind which nothing may follow,
    or that cannot be followed."""

    def __init__(self, complete=None, impossible=None):
        self.complete, self.impossible = complete, impossible
        self.waiting = []
        self.followed = []

    def matcher(self, stop_ids):
        return Follower(self)

    async def move(self, count=1):
        """Let so many tokens be followed, each as soon as one is there."""
        for _ in range(count):
            await until(lambda: self.waiting)
            token, done = self.waiting.pop(0)
            self.followed.append(token)
            done()


class Follower:
    is_costly = True

    def __init__(self, slow):
        self.slow = slow
        self.newest = None

    def advance_aside(self, token_id, done):
        self.newest = token_id
        self.slow.waiting.append((token_id, done))

    def settled(self):
        if self.newest == self.slow.impossible:
            raise InvalidField("constraint.regex", "cannot be followed")
        return self.newest == self.slow.complete


@pytest.fixture
def model():
    return FakeModel()


@pytest.fixture
def engine(model):
    made = Engine(INFO, Scheduler(BlockPool(12, 4), 64, 32), model, model, model, stream_buffer_tokens=BUFFER)
    yield made
    made.close()


def constrained(slow, *args, **options):
    return dataclasses.replace(generate(*args, **options), constraint=slow)


async def take(stream):
    """Its (tokens, finish) by index."""
    found = {}
    async for events in stream:
        for event in events:
            tokens, _ = found.setdefault(event.index, ([], None))
            tokens += [] if event.token_id is None else [event.token_id]
            found[event.index] = tokens, event.finish
    return found


async def test_others_go_on_while_a_token_is_followed(engine, model):
    slow = Slow()
    held = asyncio.create_task(take(engine.generate(constrained(slow, [1, 2], 3))))
    await until(lambda: slow.waiting)
    before = len(model.batches)
    assert await take(engine.generate(generate([50], 20))) == {0: (list(range(51, 71)), LENGTH)}
    (answer, *_), _ = await engine.embed(embed([1, 2, 3]))
    assert answer.values == [1, 2, 3]
    assert len(model.batches) - before == 21  # steps for others alone
    assert not held.done()
    assert len(slow.waiting) == 1
    await slow.move(3)
    assert await held == {0: ([3, 4, 5], LENGTH)}
    assert engine.num_blocks_used == 0


async def test_ends_of_every_kind(engine):
    cases = [
        (Slow(complete=5), {}, ([3, 4, 5], STOP)),
        (Slow(complete=5), {"count": 3}, ([3, 4, 5], STOP)),
        (Slow(complete=9), {"count": 3}, ([3, 4, 5], LENGTH)),
        (Slow(), {"count": 8, "stops": [6]}, ([3, 4, 5, 6], STOP)),  # a stop token is not followed
    ]
    for slow, options, expected in cases:
        options = {"count": 20, **options}
        task = asyncio.create_task(take(engine.generate(constrained(slow, [1, 2], **options))))
        await slow.move(3)
        assert await task == {0: expected}
        assert not slow.waiting
    slow = Slow(impossible=4)
    task = asyncio.create_task(take(engine.generate(constrained(slow, [1, 2], 9, n=3))))
    while not task.done():
        if slow.waiting:
            await slow.move()
        await asyncio.sleep(0)
    with pytest.raises(InvalidField, match="cannot be followed"):
        await task
    await until(lambda: engine.num_open == 0)
    assert engine.num_blocks_used == 0


async def test_several_continuations_and_cancellation_of_some(engine):
    slow = Slow()
    stream = engine.generate(constrained(slow, [1, 2], 4, n=3))
    task = asyncio.create_task(take(stream))
    await until(lambda: len(slow.waiting) == 3)
    stream.cancel(1)
    await slow.move(3)  # that of the cancelled one too, which is late
    await slow.move(6)
    found = await task
    assert {index: tokens for index, (tokens, _) in found.items()} == {0: [3, 4, 5, 6], 1: [3], 2: [3, 4, 5, 6]}
    stream = engine.generate(constrained(slow, [1, 2], 4))
    task = asyncio.create_task(take(stream))
    await until(lambda: slow.waiting)
    stream.cancel()
    task.cancel()
    await until(lambda: engine.num_open == 0)
    assert engine.num_blocks_used == 0
    await slow.move()
    assert (await take(engine.generate(generate([1], 2))))[0][0] == [2, 3]


async def test_a_client_that_does_not_read(engine):
    """Paused for its client and for its constraint at once, it goes on when both are over."""
    slow = Slow()
    stream = engine.generate(constrained(slow, [1, 2], 20))
    await slow.move(BUFFER)
    await until(lambda: slow.waiting and stream._job.paused)
    await slow.move()
    assert (await take(engine.generate(generate([50], 3))))[0][0] == [51, 52, 53]
    assert not slow.waiting
    task = asyncio.create_task(take(stream))
    await slow.move(11)
    assert await task == {0: (list(range(3, 23)), LENGTH)}


async def test_blocks_that_others_need_are_taken_and_computed_again(engine, model):
    slow = Slow()
    task = asyncio.create_task(take(engine.generate(constrained(slow, list(range(1, 14)), 4))))
    await slow.move(2)
    await until(lambda: slow.waiting)
    assert (await take(engine.generate(generate([50], 44))))[0][0] == list(range(51, 95))
    await until(lambda: engine.load().scheduler.num_set_back == 1)  # told behind the last answer
    assert slow.followed == [14, 15]
    await slow.move(2)
    assert await task == {0: ([14, 15, 16, 17], LENGTH)}
