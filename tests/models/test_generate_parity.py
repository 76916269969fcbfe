"""Greedy tokens of real Gemma weights in float32 against transformers, token by token."""

import asyncio

import pytest
import torch

from pyruntime.types import EmbedRequest, GenerateRequest, PoolingType, SamplingParams, ScoreRequest, StopParams
from tests.models.texts import prompt_ids

NEW_TOKENS = 24  # more than a page
# Lengths around the window (512) and the page (16) borders, then ordinary prompts.
LENGTHS = (1, 15, 16, 17, 511, 512, 513, 1500, 40, 100)
CLOSE_CALL = 1e-3


def request(ids, count=NEW_TOKENS, **sampling):
    return GenerateRequest(ids, SamplingParams(**({"temperature": 0.0} | sampling)), StopParams(count))


async def tokens_of(engine, generate_request):
    return [event.token_id async for events in engine.generate(generate_request) for event in events]


@pytest.fixture(scope="module")
def gemma(served):
    return served("gemma-3-270m", "float32")


@pytest.fixture(scope="module")
def prompts(gemma):
    return [prompt_ids(gemma.tokenizer, length, seed=length) for length in LENGTHS]


@pytest.fixture(scope="module")
def eager_answers():
    """Answers that transformers has been asked about, by prompt."""
    return {}


def assert_greedy(model, ids, own, known):
    """Each token is what transformers takes behind those before it, or as good as that."""
    if known.get(tuple(ids)) == own:
        return
    assert len(own) == NEW_TOKENS
    logits = model(torch.tensor([ids + own[:-1]]), logits_to_keep=NEW_TOKENS).logits[0]
    for step, (mine, row) in enumerate(zip(own, logits, strict=True)):
        gap = float(row.max() - row[mine])
        assert gap <= CLOSE_CALL, f"step {step}: {mine} instead of {int(row.argmax())}, gap {gap:.4f}"
    known[tuple(ids)] = own


@pytest.mark.parametrize("place", range(len(LENGTHS)), ids=LENGTHS)
async def test_alone(gemma, gemma_eager, prompts, eager_answers, place):
    own = await tokens_of(gemma.engine, request(prompts[place]))
    assert_greedy(gemma_eager, prompts[place], own, eager_answers)


async def test_with_31_other_streams(gemma, gemma_eager, prompts, eager_answers):
    """All ten prompts and 22 sampled streams run together; every answer stays greedy."""
    others = [
        request(prompt_ids(gemma.tokenizer, 20 + 3 * i, seed=900 + i), 16 + i, seed=i, temperature=1.0)
        for i in range(22)
    ]
    answers = await asyncio.gather(
        *(tokens_of(gemma.engine, request(ids)) for ids in prompts),
        *(tokens_of(gemma.engine, other) for other in others),
    )
    for ids, own in zip(prompts, answers, strict=False):
        assert_greedy(gemma_eager, ids, own, eager_answers)
    assert [len(tokens) for tokens in answers[len(prompts) :]] == [16 + i for i in range(22)]


async def test_transformers_generates_the_same(gemma, gemma_eager, prompts):
    ids = prompts[LENGTHS.index(17)]
    output = gemma_eager.generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None,
    )  # fmt: skip
    assert await tokens_of(gemma.engine, request(ids)) == output[0, len(ids) :].tolist()


async def test_seeded_draws_do_not_depend_on_the_batch(gemma):
    sampled = [
        request(prompt_ids(gemma.tokenizer, 30, seed=i), 16, seed=77 + i, temperature=0.8, top_p=0.9) for i in range(4)
    ]
    alone = [await tokens_of(gemma.engine, each) for each in sampled]
    together = await asyncio.gather(*(tokens_of(gemma.engine, each) for each in sampled))
    assert alone == together


async def test_one_forward_carries_all_three_tasks(gemma, gemma_eager):
    """A recorded batch holds decode rows, a prompt, a text to embed and an item to score; each is right."""
    runner, batches = gemma.engine._steps._runner, []
    forward = runner.forward

    def recording(batch):
        batches.append([(rows.task.value, rows.length, rows.reads) for rows in batch.rows])
        return forward(batch)

    ids = [prompt_ids(gemma.tokenizer, 24, seed=s) for s in range(4)]
    embed = EmbedRequest([ids[2]], PoolingType.MEAN, True, 640)
    score = ScoreRequest([], [ids[3]], [10, 20, 30], apply_softmax=True)
    alone = (
        await tokens_of(gemma.engine, request(ids[0], 40)),
        await tokens_of(gemma.engine, request(ids[1], 5)),
        (await gemma.engine.embed(embed))[0][0].values,
        (await gemma.engine.score(score))[0][0].scores,
    )
    runner.forward = recording
    try:
        stream = gemma.engine.generate(request(ids[0], 40))
        events, rest = [], None
        async for some in stream:
            events += some
            if rest is None:
                rest = asyncio.gather(
                    tokens_of(gemma.engine, request(ids[1], 5)), gemma.engine.embed(embed), gemma.engine.score(score)
                )
        prompt, (vectors, _), (scores, _) = await rest
    finally:
        runner.forward = forward
    mixed = [batch for batch in batches if {task for task, _, _ in batch} == {"generate", "embed", "score"}]
    assert mixed, batches
    # A decode row and a prompt, whose beginning the run alone has left in the prefix cache.
    assert any({length for task, length, _ in batch if task == "generate"} == {1, 24 - 16} for batch in mixed)
    assert [event.token_id for event in events] == alone[0]
    assert prompt == alone[1]
    torch.testing.assert_close(torch.tensor(vectors[0].values), torch.tensor(alone[2]), atol=2e-6, rtol=0)
    torch.testing.assert_close(torch.tensor(scores[0].scores), torch.tensor(alone[3]), atol=1e-5, rtol=0)
    hidden = gemma_eager.model(torch.tensor([ids[2]])).last_hidden_state[0].mean(0)
    expected = torch.nn.functional.normalize(hidden, dim=0)
    assert float(torch.tensor(vectors[0].values) @ expected) >= 0.99999


async def test_long_prompt_in_chunks_embeds_like_eager(gemma, gemma_eager):
    """2,100 tokens exceed one step's budget, so the mean is taken over several chunks."""
    ids = prompt_ids(gemma.tokenizer, 2100, seed=3)
    vectors, _ = await gemma.engine.embed(EmbedRequest([ids], PoolingType.MEAN, True, 640))
    hidden = gemma_eager.model(torch.tensor([ids])).last_hidden_state[0].mean(0)
    assert float(torch.tensor(vectors[0].values) @ torch.nn.functional.normalize(hidden, dim=0)) >= 0.99999
