"""Real models behind a real channel: everything at once, nothing lost, memory back."""

import asyncio
import gc
import os

import grpc
import numpy as np
import pytest

from pyruntime.v1 import (
    common_pb2,
    embed_pb2,
    embed_pb2_grpc,
    generate_pb2,
    generate_pb2_grpc,
    score_pb2,
    score_pb2_grpc,
)
from tests.models.lent import serving
from tests.models.texts import text

GEMMA, MINILM = "gemma-3-270m", "all-minilm-l6-v2"
# The allocator keeps some pages for reuse; what a leak of one burst would add is well above this.
MEMORY_SLACK = 96 * 2**20


@pytest.fixture
async def channel(served):
    models = {name: served(name, "float32") for name in (GEMMA, MINILM)}
    async with serving(models) as (server, _), grpc.aio.insecure_channel(server.address) as opened:
        yield opened


def generate_request(i):
    """Every other stream is greedy: those must not change with the batch. A draw may, where rounding moves a border."""
    return generate_pb2.GenerateRequest(
        model=GEMMA,
        text=text(i, 8 + i),
        sampling=generate_pb2.Sampling(temperature=i % 2, seed=i),
        stop=generate_pb2.Stop(max_new_tokens=12, ignore_eos=True),
    )


def embed_request(i):
    return embed_pb2.EmbedRequest(
        model=MINILM if i % 4 else GEMMA,
        inputs=[common_pb2.Input(text=text(1000 + i + 7 * j, 2 + i % 60)) for j in range(2)],
    )


def score_request(i):
    return score_pb2.ScoreRequest(
        model=GEMMA,
        query=common_pb2.Input(text=text(2000 + i, 40)),
        items=[common_pb2.Input(text=" " + text(3000 + i + j, 3 + j)) for j in range(3)],
        labels=[" yes", " no"],
        apply_softmax=True,
    )


async def streamed(stub, request):
    ids, pieces, finishes, usage = [], [], [], None
    async for chunk in stub.GenerateStream(request):
        ids += chunk.token_ids
        pieces.append(chunk.text)
        finishes += [chunk.finish_reason] if chunk.finish_reason else []
        usage = chunk.usage if chunk.HasField("usage") else usage
    assert finishes == [generate_pb2.FINISH_REASON_LENGTH]
    assert usage.completion_tokens == 12 == len(ids)
    return ids, "".join(pieces)


def values(response):
    return np.array([result.dense.values for result in response.results])


def scores(response):
    return np.array([result.scores for result in response.results])


def resident_bytes():
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def burst(channel):
    """32 streams, 100 embeds and 25 scores at once."""
    generate = generate_pb2_grpc.GenerateServiceStub(channel)
    embed = embed_pb2_grpc.EmbedServiceStub(channel)
    score = score_pb2_grpc.ScoreServiceStub(channel)
    answers = await asyncio.gather(
        *(streamed(generate, generate_request(i)) for i in range(32)),
        *(embed.Embed(embed_request(i)) for i in range(100)),
        *(score.Score(score_request(i)) for i in range(25)),
    )
    return answers[:32], answers[32:132], answers[132:]


async def test_everything_at_once(channel, served):
    streams, embeds, scored = await burst(channel)
    level = resident_bytes()
    again, _, _ = await burst(channel)
    assert resident_bytes() <= level + MEMORY_SLACK
    for name in (GEMMA, MINILM):
        engine = served(name, "float32").engine
        assert (engine.num_open, engine.num_blocks_used) == (0, 0)

    generate = generate_pb2_grpc.GenerateServiceStub(channel)
    embed = embed_pb2_grpc.EmbedServiceStub(channel)
    score = score_pb2_grpc.ScoreServiceStub(channel)
    assert again[::2] == streams[::2]
    for i in range(0, 32, 6):
        unary = await generate.Generate(generate_request(i))
        assert (list(unary.completions[0].token_ids), unary.completions[0].text) == streams[i]
    for i in range(0, 100, 9):
        alone = values(await embed.Embed(embed_request(i)))
        assert (values(embeds[i]) * alone).sum(axis=1) == pytest.approx(1.0, abs=1e-5)
    for i in range(0, 25, 5):
        np.testing.assert_allclose(scores(scored[i]), scores(await score.Score(score_request(i))), atol=1e-4)


async def test_a_stream_that_the_client_leaves_frees_its_blocks(channel, served):
    engine = served(GEMMA, "float32").engine
    request = generate_request(1)
    request.stop.max_new_tokens = 4000
    call = generate_pb2_grpc.GenerateServiceStub(channel).GenerateStream(request)
    await call.read()
    call.cancel()
    for _ in range(2000):
        if engine.num_open == 0:
            break
        await asyncio.sleep(0.005)
    assert (engine.num_open, engine.num_blocks_used) == (0, 0)


async def test_a_passed_deadline_stops_the_work(channel, served):
    engine = served(GEMMA, "float32").engine
    request = generate_request(1)
    request.stop.max_new_tokens = 4000
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await generate_pb2_grpc.GenerateServiceStub(channel).Generate(request, timeout=0.3)
    assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    for _ in range(2000):
        if engine.num_open == 0:
            break
        await asyncio.sleep(0.005)
    assert (engine.num_open, engine.num_blocks_used) == (0, 0)
