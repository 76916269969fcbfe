"""A model that computes nothing, for tests of the step thread: builder, runner and heads in one."""

from __future__ import annotations

import asyncio
import threading

from pyruntime.types import (
    Capability,
    EmbedRequest,
    ForwardBatch,
    GenerateRequest,
    ModelInfo,
    PoolingType,
    SampledToken,
    SamplingParams,
    SequenceRows,
    StopParams,
    Task,
)

INFO = ModelInfo(
    name="fake",
    architecture="Fake",
    dtype="float32",
    device="cpu",
    capabilities=frozenset(Capability),
    context_length=200,
    vocab_size=1000,
    embedding_dimensions=4,
    default_pooling=PoolingType.LAST,
    normalize_default=False,
)


class FakeModel:
    """Builder, runner and heads in one: the next token is the last token plus one.

    ``hold`` makes every step wait for ``release``; ``broken`` makes the forward raise.
    """

    def __init__(self):
        self.batches = []
        self.hold = False
        self.broken = False
        self.not_finite = set()
        self.entered = threading.Event()
        self.released = threading.Semaphore(0)

    def build(self, plan):
        rows = [
            SequenceRows(s, s.task, 0, n, s.num_computed + n == len(s) and not s.is_prefix) for s, n in plan.entries
        ]
        return ForwardBatch(rows, None, None, None)

    def forward(self, batch):
        self.entered.set()
        if self.hold:
            self.released.acquire()
        self.batches.append([(rows.task, rows.length) for rows in batch.rows])
        if self.broken:
            raise RuntimeError("device on fire")
        return None

    def read(self, hidden, batch):
        outputs = {Task.GENERATE: lambda s: SampledToken(s.token_ids[-1] + 1), Task.EMBED: lambda s: list(s.token_ids)}
        outputs[Task.SCORE] = outputs[Task.CLASSIFY] = lambda s: [float(sum(s.token_ids))]
        sequences = [rows.sequence for rows in batch.rows if rows.reads]
        return [None if s.token_ids[0] in self.not_finite else outputs[s.task](s) for s in sequences]


def generate(prompt, count, n=1, stops=(), least=0):
    stop = StopParams(max_new_tokens=count, min_new_tokens=least, token_ids=frozenset(stops))
    return GenerateRequest(prompt, SamplingParams(), stop, n=n)


def embed(*inputs):
    return EmbedRequest(list(inputs), PoolingType.LAST, False, 4)


async def collect(stream):
    return [event async for events in stream for event in events]


async def until(condition):
    """Wait for the step thread without guessing how long it takes."""
    while not condition():
        await asyncio.sleep(0.001)
