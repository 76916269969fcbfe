"""What a stream's messages hold: so many tokens at least, and the prompt's log-probabilities before everything else."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import numpy as np
import pytest

from pyruntime.client import AsyncClient, Client
from pyruntime.service import chunks
from pyruntime.types import FinishReason, PromptLogprobs, TokenEvent
from pyruntime.v1 import generate_pb2
from tests.fakes import BOS, EOS, FakeStream, play
from tests.service.conftest import Stack, failure_of

STOP, LENGTH = generate_pb2.FINISH_REASON_STOP, generate_pb2.FINISH_REASON_LENGTH
TEXTS = ["日本語 and more", "🙂🙃 e\u0301\u0323 ok", "so ENd EN", "no EN.END after"]


async def stream(stack: Stack, played: FakeStream, request) -> list[generate_pb2.GenerateChunk]:
    stack.engine.next_stream = played
    return [chunk async for chunk in stack.generate.GenerateStream(request)]


async def unary(stack: Stack, played: FakeStream, request) -> generate_pb2.GenerateResponse:
    stack.engine.next_stream = played
    return await stack.generate.Generate(request)


def joined(received: list[generate_pb2.GenerateChunk], index: int) -> generate_pb2.Completion:
    own = [chunk for chunk in received if chunk.index == index and not chunk.prompt_logprobs]
    return generate_pb2.Completion(
        index=index,
        text="".join(chunk.text for chunk in own),
        token_ids=[token for chunk in own for token in chunk.token_ids],
        logprobs=[entry for chunk in own for entry in chunk.logprobs],
        finish_reason=own[-1].finish_reason,
        matched_stop=own[-1].matched_stop,
    )


def with_logprobs(played: FakeStream, prompt: PromptLogprobs | None = None) -> FakeStream:
    """A log-probability, an alternative and two selected ones for each token, unlike any other's."""
    number, wakeups = 0, []
    for events in played.wakeups:
        wakeups.append([])
        for event in events:
            number += 1
            more = {"logprob": -number / 4, "top": ((65, -0.5),), "selected": (-number / 8, -9.0)}
            wakeups[-1].append(replace(event, **more, prompt=prompt if number == 1 else None))
    return FakeStream(wakeups)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("chunk_tokens", [1, 2, 3, 7, 1024])
@pytest.mark.parametrize("per_wakeup", [1, 4])
async def test_larger_chunks_equal_the_unary_answer(stack: Stack, text: str, chunk_tokens: int, per_wakeup: int):
    request = generate_pb2.GenerateRequest(
        text="hi", n=2, chunk_tokens=chunk_tokens, stop={"strings": ["END"]}, logprobs={"enabled": True, "top": 1}
    )

    def new() -> FakeStream:
        return with_logprobs(play(text, n=2, per_wakeup=per_wakeup))

    whole = await unary(stack, new(), request)
    received = await stream(stack, new(), request)
    assert [joined(received, index) for index in range(2)] == list(whole.completions)
    assert [chunk.HasField("usage") for chunk in received] == [False] * (len(received) - 1) + [True]
    assert received[-1].usage == whole.usage
    for chunk in received:
        assert len(chunk.token_ids) >= chunk_tokens or chunk.finish_reason
        assert len(chunk.token_ids) < chunk_tokens + per_wakeup


async def test_every_continuation_has_chunks_of_its_own(stack: Stack):
    """Index 1 moves with every other wake-up, index 0 ends early."""
    wakeups = [
        [TokenEvent(0, 97, FinishReason.STOP if place == 4 else None)] * (place < 5)
        + [TokenEvent(1, 98, FinishReason.LENGTH if place == 10 else None)] * (place % 2 == 0)
        for place in range(11)
    ]
    request = generate_pb2.GenerateRequest(text="hi", n=2, chunk_tokens=3)
    received = await stream(stack, FakeStream(wakeups), request)
    assert [(chunk.index, len(chunk.token_ids), chunk.text) for chunk in received] == [
        (0, 3, "aaa"),
        (0, 2, "a"),
        (1, 3, "bbb"),
        (1, 3, "bbb"),
    ]


async def test_random_bytes_stops_and_chunks(stack: Stack):
    """Any bytes at all, cut anyhow: the stream is the unary answer."""
    draw = random.Random(11)
    for _ in range(60):
        text = bytes(draw.choice([*b"aEND", 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x99, 0x82]) for _ in range(30))
        chunk_tokens, per_wakeup = draw.randint(1, 9), draw.randint(1, 5)
        end = draw.choice([None, EOS])
        request = generate_pb2.GenerateRequest(text="x", chunk_tokens=chunk_tokens, stop={"strings": ["END", "aE"]})
        whole = await unary(stack, play(text, per_wakeup=per_wakeup, end=end), request)
        received = await stream(stack, play(text, per_wakeup=per_wakeup, end=end), request)
        assert joined(received, 0) == whole.completions[0]


PROMPT = PromptLogprobs(
    np.array([[104, 105, 101], [105, 105, 102], [33, 105, 103]]),
    np.array([[-1.5, -0.25, -0.5], [-0.125, -0.125, -2], [-4, -0.25, -0.75]], np.float32),
)
ASKED = {"enabled": True, "top": 2, "prompt": True, "token_ids": [7, 9]}


def entries(found) -> list[tuple]:
    return [(e.token_id, e.text, e.logprob, [(a.token_id, a.text, a.logprob) for a in e.top]) for e in found]


EXPECTED = [
    (104, "h", -1.5, [(105, "i", -0.25), (101, "e", -0.5)]),
    (105, "i", -0.125, [(105, "i", -0.125), (102, "f", -2)]),
    (33, "!", -4, [(105, "i", -0.25), (103, "g", -0.75)]),
]


async def test_prompt_logprobs_once_and_first(stack: Stack, monkeypatch):
    monkeypatch.setattr(chunks, "MOST_ENTRIES", 6)  # two tokens with two alternatives each
    request = generate_pb2.GenerateRequest(text="hi!", n=2, logprobs=ASKED, chunk_tokens=2)
    whole = await unary(stack, with_logprobs(play("okay", n=2), PROMPT), request)
    assert entries(whole.prompt_logprobs) == EXPECTED
    assert len(whole.prompt_logprobs) == whole.usage.prompt_tokens - 1
    received = await stream(stack, with_logprobs(play("okay", n=2), PROMPT), request)
    assert [len(chunk.prompt_logprobs) for chunk in received[:3]] == [2, 1, 0]
    assert not any(chunk.token_ids or chunk.text or chunk.index for chunk in received[:2])
    assert entries(e for chunk in received for e in chunk.prompt_logprobs) == EXPECTED
    assert [joined(received, index) for index in range(2)] == list(whole.completions)
    assert [list(e.selected) for e in whole.completions[0].logprobs] == [[-k / 8, -9.0] for k in (1, 3, 5, 7)]
    job = stack.engine.generated[0]
    assert (job.prompt, job.prompt_logprobs, job.sampling.logprob_ids) == ([BOS, *b"hi!"], 2, (7, 9))


async def test_a_prompt_of_one_token_has_no_entries(stack: Stack):
    nothing = PromptLogprobs(np.zeros((0, 3), np.int64), np.zeros((0, 3), np.float32))
    request = generate_pb2.GenerateRequest(token_ids={"ids": [5]}, logprobs=ASKED)
    assert not (await unary(stack, with_logprobs(play("ok"), nothing), request)).prompt_logprobs
    assert len(await stream(stack, with_logprobs(play("ok"), nothing), request)) == 2


async def test_a_response_that_they_cannot_fit_is_refused_before_any_work(stack: Stack, monkeypatch):
    monkeypatch.setattr(chunks, "LEAST_ENTRY_BYTES", 10_000)
    request = generate_pb2.GenerateRequest(text="hi!", logprobs=ASKED | {"top": 3})
    failure = await failure_of(stack.generate.Generate(request))
    assert "12 log-probabilities make a response of at least 120000 bytes" in failure.violations["logprobs.prompt"]
    assert not stack.engine.generated
    assert await stream(stack, play("ok"), request)


async def test_both_clients_know_the_options(stack: Stack):
    options = {"logprobs": 1, "prompt_logprobs": True, "logprob_token_ids": np.array([4, 5]), "chunk_tokens": 3}
    stack.engine.next_stream = play("okay")

    def work() -> None:
        with Client(stack.address, model="decoder") as client:
            assert list(client.stream("hi", **options)) == ["oka", "y"]
            assert client.generate("hi", **options) == "okay"

    await asyncio.to_thread(work)
    async with AsyncClient(stack.address, model="decoder") as client:
        assert [text async for text in client.stream("hi", **options)] == ["oka", "y"]
    for job in stack.engine.generated:
        assert (job.prompt_logprobs, job.sampling.logprobs, job.sampling.logprob_ids) == (1, 1, (4, 5))


async def test_a_stream_that_the_engine_ends_early_ends(stack: Stack):
    """It does not happen; were it to, a server that went on asking would do nothing else any more."""
    received = await stream(stack, FakeStream([[TokenEvent(0, 97, None)]]), generate_pb2.GenerateRequest(text="hi"))
    assert [(chunk.text, chunk.finish_reason) for chunk in received] == [("a", generate_pb2.FINISH_REASON_UNSPECIFIED)]
