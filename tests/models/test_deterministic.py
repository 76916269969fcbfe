"""With the option ``deterministic`` an answer is the same bits whatever shares its batch."""

import asyncio
import random

import numpy as np
import pytest

from pyruntime.config import Settings
from pyruntime.serving import load_served_model
from pyruntime.types import EmbedRequest, GenerateRequest, PoolingType, SamplingParams, ScoreRequest, StopParams
from tests.models.texts import prompt_ids

ROUNDS = 2


@pytest.fixture(scope="module")
def gemma(folders):
    settings = Settings(dtype="bfloat16", deterministic=True, max_batch_tokens=96, kv_cache_bytes=2**28)
    model = load_served_model("gemma", folders["gemma-3-270m"], settings, print)
    yield model
    model.engine.close()


@pytest.fixture(scope="module")
def minilm(folders):
    model = load_served_model(
        "minilm", folders["all-minilm-l6-v2"], Settings(dtype="bfloat16", deterministic=True), print
    )
    yield model
    model.engine.close()


def generate(ids, seed, temperature, count=12):
    return GenerateRequest(ids, SamplingParams(temperature=temperature, top_p=0.95, seed=seed), StopParams(count))


async def tokens(engine, request):
    return [event.token_id async for events in engine.generate(request) for event in events]


async def test_tokens_vectors_and_scores_of_a_decoder(gemma):
    """Random company, chunk borders and cache states; greedy and seeded."""
    engine, generator = gemma.engine, random.Random(3)
    ids = [prompt_ids(gemma.tokenizer, 20 + 30 * i, seed=i) for i in range(4)]
    requests = [generate(ids[0], 1, 0.0), generate(ids[1], 2, 1.0), generate(ids[2], 3, 1.5)]
    embed = EmbedRequest([ids[3], ids[0]], PoolingType.MEAN, True, 640)
    score = ScoreRequest(ids[1], [ids[2][1:9], ids[3][1:20]], [5, 6, 7], apply_softmax=False)

    async def ours():
        *generated, (vectors, _), (scores, _) = await asyncio.gather(
            *(tokens(engine, request) for request in requests), engine.embed(embed), engine.score(score)
        )
        return generated, [v.values.tobytes() for v in vectors], [s.scores for s in scores]

    expected = [await tokens(engine, request) for request in requests]
    first = await ours()
    assert first[0] == expected
    for _ in range(ROUNDS):
        company = [
            generate(prompt_ids(gemma.tokenizer, generator.randrange(1, 150), seed=generator.random()), i, 1.0)
            for i in range(generator.randrange(1, 30))
        ]
        again, *_ = await asyncio.gather(ours(), *(tokens(engine, request) for request in company))
        assert again == first


async def test_vectors_of_an_encoder(minilm):
    engine, generator = minilm.engine, random.Random(4)
    ids = [prompt_ids(minilm.tokenizer, n, seed=n) for n in (3, 17, 64, 200)]

    async def embed(inputs):
        results, _ = await engine.embed(EmbedRequest(inputs, PoolingType.MEAN, True, 384))
        return [result.values for result in results]

    alone = [(await embed([each]))[0] for each in ids]
    for _ in range(ROUNDS):
        company = [prompt_ids(minilm.tokenizer, generator.randrange(3, 200), seed=i) for i in range(20)]
        together = ids + company
        order = list(range(len(together)))
        generator.shuffle(order)
        vectors = await embed([together[place] for place in order])
        for place, vector in zip(order, vectors, strict=True):
            if place < len(ids):
                np.testing.assert_array_equal(vector, alone[place])
