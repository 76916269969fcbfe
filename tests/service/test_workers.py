"""Tokenising in slices: requests take turns, and a call that has ended costs no more than the slice it is in."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable

import grpc
import pytest

from pyruntime.service.inputs import InputLimits, Reading, read_inputs
from pyruntime.service.workers import SLICE_BYTES, TextWorkers, slices
from pyruntime.types import Capability
from pyruntime.v1 import common_pb2, embed_pb2, generate_pb2, model_pb2, score_pb2
from tests.fakes import BOS, fake_model
from tests.service.conftest import SETTINGS, Stack

Input = common_pb2.Input
LIMITS = InputLimits(max_text_bytes=2**20, max_messages=8)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], []),
        ([0, 0], [(0, 2)]),
        ([4, 6, 1], [(0, 2), (2, 3)]),
        ([11, 1, 12, 13], [(0, 1), (1, 2), (2, 3), (3, 4)]),
        ([3, 3, 3, 3], [(0, 3), (3, 4)]),
    ],
)
def test_slices(sizes: list[int], expected: list[tuple[int, int]]):
    assert [(places.start, places.stop) for places in slices(sizes, 10)] == expected


async def test_requests_take_turns():
    model = fake_model("m", {Capability.EMBED})
    encode, order = model.tokenizer.encode_batch, []

    def recording(texts: list[str], **options) -> list[list[int]]:
        order.append((texts[0][0], sum(map(len, texts))))
        return encode(texts, **options)

    model.tokenizer.encode_batch = recording  # type: ignore[method-assign]
    workers = TextWorkers(1)
    size = SLICE_BYTES // 2

    def read(letter: str, times: int):
        return read_inputs(workers, model, [Input(text=letter * size)] * times, Reading("inputs", LIMITS))

    long, short = await asyncio.gather(read("a", 6), read("b", 1))
    assert order == [("a", 2 * size), ("b", size), ("a", 2 * size), ("a", 2 * size)]
    assert [ids == [BOS, *[97] * size] for ids in long] == [True] * 6
    assert short == [[BOS, *[98] * size]]
    workers.close()


class Held:
    """A tokenizer whose every job waits until it is let go."""

    def __init__(self, stack: Stack) -> None:
        self.begun, self.go, self.jobs = threading.Event(), threading.Event(), 0
        for name in ("encode_batch", "decode", "render_chat"):
            self._hold(stack.decoder.tokenizer, name)

    def _hold(self, tokenizer, name: str) -> None:
        original = getattr(tokenizer, name)

        def held(*args, **options):
            if args[0] != ["a"]:  # the probe for leading special tokens, which is no request's text
                self.jobs += 1
                self.begun.set()
                assert self.go.wait(10)
            return original(*args, **options)

        setattr(tokenizer, name, held)


TEXT = "b" * 3000
CALLS: dict[str, Callable[[Stack], Callable]] = {
    "embed": lambda stack: functools.partial(
        stack.embed.Embed, embed_pb2.EmbedRequest(model="decoder", inputs=[Input(text=TEXT)] * 8, truncation=2)
    ),
    "items": lambda stack: functools.partial(
        stack.score.Score,
        score_pb2.ScoreRequest(
            query=Input(token_ids={"ids": [5]}), items=[Input(text=TEXT)] * 8, label_token_ids=[1], truncation=2
        ),
    ),
    "labels": lambda stack: functools.partial(
        stack.score.Score,
        score_pb2.ScoreRequest(query=Input(token_ids={"ids": [5]}), items=[Input(text="c")], labels=[TEXT] * 8),
    ),
    "chat": lambda stack: functools.partial(
        stack.generate.Generate,
        generate_pb2.GenerateRequest(chat=generate_pb2.Chat(messages=[{"role": "user", "content": TEXT}])),
    ),
    "tokenize": lambda stack: functools.partial(
        stack.models.Tokenize, model_pb2.TokenizeRequest(model="decoder", text=TEXT)
    ),
    "detokenize": lambda stack: functools.partial(
        stack.models.Detokenize, model_pb2.DetokenizeRequest(model="decoder", token_ids=[98] * 3000)
    ),
}


@pytest.mark.parametrize("name", CALLS)
async def test_a_call_that_has_ended_stops_after_its_slice(stack: Stack, monkeypatch, name: str):
    small = functools.partial(slices, most=4000)
    monkeypatch.setattr("pyruntime.service.inputs.slices", small)
    monkeypatch.setattr("pyruntime.service.score_inputs.slices", small)
    room = stack.server._room
    room.settings = SETTINGS.model_copy(update={"max_text_bytes": 50_000, "max_request_text_bytes": 50_000})
    room.workers = TextWorkers(1)
    held = Held(stack)
    call = CALLS[name](stack)
    expiring = [asyncio.ensure_future(call(timeout=0.4)) for _ in range(5)]
    assert await asyncio.to_thread(held.begun.wait, 5)
    for each in await asyncio.gather(*expiring, return_exceptions=True):
        assert isinstance(each, grpc.aio.AioRpcError)
        assert each.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    for _ in range(100):  # until the server, too, knows that they have ended
        if stack.server.num_running == 0:
            break
        await asyncio.sleep(0.05)
    held.go.set()
    await asyncio.wait_for(room.workers.run_aside(int), 5)  # behind whatever was still waiting
    assert held.jobs == 1
    room.workers.close()
