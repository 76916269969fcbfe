"""Penalties and log-probabilities of real Gemma weights against transformers' own processors, in float32."""

import pytest
import torch
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from pyruntime.types import GenerateRequest, SamplingParams, StopParams
from tests.models.texts import prompt_ids

NEW_TOKENS = 24


@pytest.fixture(scope="module")
def gemma(served):
    return served("gemma-3-270m", "float32")


async def events_of(engine, ids, **sampling):
    request = GenerateRequest(ids, SamplingParams(temperature=0.0, **sampling), StopParams(NEW_TOKENS))
    return [event async for events in engine.generate(request) for event in events]


async def test_repetition_penalty_gives_the_tokens_of_transformers(gemma, gemma_eager):
    ids = prompt_ids(gemma.tokenizer, 60, seed=8)
    plain = [event.token_id for event in await events_of(gemma.engine, ids)]
    own = [event.token_id for event in await events_of(gemma.engine, ids, repetition_penalty=1.3)]
    reference = gemma_eager.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        logits_processor=LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.3)]),
    )
    assert own == reference[0, len(ids) :].tolist()
    assert own != plain


async def test_logprobs_equal_eager(gemma, gemma_eager):
    ids = prompt_ids(gemma.tokenizer, 33, seed=9)
    events = await events_of(gemma.engine, ids, logprobs=5, frequency_penalty=0.7, presence_penalty=0.2)
    tokens = [event.token_id for event in events]
    # The raw distribution: whatever penalties chose the token, its log-probability is the model's own.
    logits = gemma_eager(torch.tensor([ids + tokens]), logits_to_keep=NEW_TOKENS + 1).logits[0, :-1]
    reference = torch.log_softmax(logits.double(), dim=-1)
    for event, row in zip(events, reference, strict=True):
        assert event.logprob == pytest.approx(float(row[event.token_id]), abs=1e-3)
        values, _ = row.topk(5)
        assert [value for _, value in event.top] == pytest.approx(values.tolist(), abs=1e-3)
        for token_id, value in event.top:
            assert value == pytest.approx(float(row[token_id]), abs=1e-3)
