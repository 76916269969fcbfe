"""Everything at once for some seconds: each request ends in exactly one right way, and nothing is left behind."""

import asyncio
import time
from collections import Counter
from random import Random

import pytest

from pyruntime.engine import Engine
from pyruntime.errors import ComputeFault, DeadlinePassed, Overloaded
from pyruntime.scheduler.blocks import BlockPool
from pyruntime.scheduler.prefix_cache import PrefixCache
from pyruntime.scheduler.scheduler import Scheduler
from pyruntime.types import (
    ClassifyRequest,
    EmbedRequest,
    GenerateRequest,
    PoolingType,
    SamplingParams,
    ScoreRequest,
    StopParams,
    Task,
)
from tests.fake_compute import INFO, FakeModel, until

SECONDS = 3.0
NUM_CLIENTS = 96  # three times what the engine takes
BLOCK, NUM_BLOCKS = 4, 150
POISON, NOT_FINITE = 900, 901  # the first token of requests that make the forward raise, or their own row NaN
ERRORS = (Overloaded, DeadlinePassed, ComputeFault)
OUTCOMES = ["answered", "stopped by its client", *(kind.__name__ for kind in ERRORS)]


class CheckedModel(FakeModel):
    """Remembers which token was written to each place of the cache, and whether each sequence still finds its own."""

    def __init__(self, seed):
        super().__init__()
        self.not_finite = {NOT_FINITE}
        self.wrong = []
        self._random = Random(seed)
        self._cache = {}

    def build(self, plan):
        for source, target in plan.block_copies:
            for place in range(BLOCK):
                self._cache[target * BLOCK + place] = self._cache.get(source * BLOCK + place)
        for sequence, num_tokens in plan.entries:
            end = sequence.num_computed + num_tokens
            slots = [sequence.blocks[place // BLOCK] * BLOCK + place % BLOCK for place in range(end)]
            for place in range(sequence.num_computed, end):
                self._cache[slots[place]] = (place, sequence.token_ids[place])
            if [self._cache[slot] for slot in slots] != list(enumerate(sequence.token_ids[:end])):
                self.wrong.append(sequence)
        return super().build(plan)

    def forward(self, batch):
        if any(rows.sequence.token_ids[0] == POISON for rows in batch.rows):
            raise RuntimeError("poison")
        if self._random.random() < 0.01:
            raise MemoryError  # for once: run again, it works

    def read(self, hidden, batch):
        time.sleep(0.0005)  # lets the event loop have the interpreter, as a forward does
        return super().read(hidden, batch)


class Client:
    """Sends one random request after the other, and checks whatever is answered."""

    def __init__(self, engine, seed, outcomes):
        self._engine = engine
        self._random = Random(seed)
        self._outcomes = outcomes

    async def run(self, until_s):
        while time.monotonic() < until_s:
            self._outcomes[await self._one()] += 1

    async def _one(self):
        draw = self._random
        work = draw.choice([self._generate, self._embed, self._score, self._classify])
        deadline = time.monotonic() + draw.uniform(0, 0.5) if draw.random() < 0.3 else None
        task, priority = draw.choice(list(Task)), draw.randint(-2, 2)
        call = asyncio.ensure_future(self._call(work, task, priority, deadline))
        patience = draw.uniform(0, 0.1) if draw.random() < 0.2 else None
        try:
            await asyncio.wait_for(call, patience)
        except TimeoutError:
            return "stopped by its client"
        except ERRORS as error:
            if isinstance(error, Overloaded):
                await asyncio.sleep(min(error.retry_after_s, 0.02))
            return type(error).__name__
        return "answered"

    async def _call(self, work, task, priority, deadline):
        with self._engine.admit(task, priority, num_bytes=self._random.randint(0, 600), deadline=deadline) as ticket:
            await work(priority, ticket)

    def _ids(self, least=1, most=60):
        draw = self._random
        shared = [7, 8, 9, 10] * draw.choice([0, 0, 2, 5])
        ids = [*shared, *(draw.randrange(1, 800) for _ in range(draw.randint(least, most)))]
        first = draw.random()
        return [POISON, *ids] if first < 0.02 else [NOT_FINITE, *ids] if first < 0.04 else ids

    async def _generate(self, priority, ticket):
        prompt, count, n = self._ids(), self._random.randint(1, 40), self._random.choice([1, 1, 2, 3])
        request = GenerateRequest(prompt, SamplingParams(), StopParams(count), n=n, priority=priority)
        stream, seen = self._engine.generate(request, ticket=ticket), [[] for _ in range(n)]
        leaves_at = self._random.randint(1, 80) if self._random.random() < 0.1 else None
        slow = self._random.random() < 0.3
        try:
            async for events in stream:
                for event in events:
                    seen[event.index].append(event.token_id)
                if slow:
                    await asyncio.sleep(0.003)
                if leaves_at is not None and sum(map(len, seen)) >= leaves_at:
                    return
        finally:
            stream.cancel()
        assert seen == [list(range(prompt[-1] + 1, prompt[-1] + 1 + count))] * n

    async def _embed(self, priority, ticket):
        inputs = [self._ids(most=120) for _ in range(self._random.randint(1, 4))]
        pooling = self._random.choice(list(PoolingType))
        request = EmbedRequest(inputs, pooling, False, 4, priority=priority)
        results, _ = await self._engine.embed(request, ticket=ticket)
        self._check([result.values for result in results], inputs, lambda ids: ids)

    async def _score(self, priority, ticket):
        prefix, items = self._ids(), [self._ids(most=20) for _ in range(self._random.randint(1, 6))]
        request = ScoreRequest(prefix, items, [0], True, priority=priority)
        results, _ = await self._engine.score(request, ticket=ticket)
        self._check([result.scores or None for result in results], [prefix + ids for ids in items], total)

    async def _classify(self, priority, ticket):
        inputs = [self._ids(most=80) for _ in range(self._random.randint(1, 4))]
        request = ClassifyRequest(inputs, priority=priority)
        results, _ = await self._engine.classify(request, ticket=ticket)
        self._check([result.scores for result in results], inputs, total)

    def _check(self, values, inputs, expected):
        assert values == [None if ids[0] == NOT_FINITE else expected(ids) for ids in inputs]


def total(ids):
    return [float(sum(ids))]


@pytest.mark.parametrize("seed", [1])
async def test_chaos(seed):
    model, pool, outcomes = CheckedModel(seed), BlockPool(NUM_BLOCKS, BLOCK), Counter()
    scheduler = Scheduler(pool, 64, 16, 32, PrefixCache(pool), priority_ageing_s=0.5)
    engine = Engine(
        INFO,
        scheduler,
        model,
        model,
        model,
        max_queue_requests=NUM_CLIENTS // 3,
        max_queue_tokens=1500,
        stream_buffer_tokens=4,
    )
    until_s = time.monotonic() + SECONDS
    await asyncio.gather(*(Client(engine, (seed << 32) + i, outcomes).run(until_s) for i in range(NUM_CLIENTS)))
    await until(lambda: engine.num_open == 0)
    await until(lambda: engine.load().scheduler == scheduler.load())  # the published figures are up to date
    load = engine.load()
    assert model.wrong == []
    assert not engine.is_closed
    assert (load.num_requests, load.num_queued_tokens, engine.num_blocks_used) == (0, 0, 0)
    assert not any([*load.scheduler.num_waiting.values(), *load.scheduler.num_running.values()])
    assert load.scheduler.num_paused == 0
    assert len(engine._loop._deadlines) < 100
    assert all(outcomes[each] > 0 for each in OUTCOMES), outcomes
    engine.close()
