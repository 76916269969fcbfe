"""Log-probabilities of prompts and of chosen tokens against transformers' eager log-softmax, through the engine."""

import asyncio
from random import Random

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from pyruntime.client import AsyncClient
from pyruntime.config import Settings
from pyruntime.serving import load_served_model
from pyruntime.types import FinishReason, GenerateRequest, PromptLogprobs, SamplingParams, StopParams
from tests.fakes import byte_tokenizer
from tests.models.architectures import DECODERS, save
from tests.models.lent import serving
from tests.models.texts import prompt_ids

TOP = 5
TINY = ["llama", "gemma2", "mistral", "gpt2", "cohere", "granite"]


async def events_of(engine, ids, count=4, n=1, wanted: int | None = TOP, **sampling):
    params = SamplingParams(**({"temperature": 0.0} | sampling))
    request = GenerateRequest(ids, params, StopParams(count), n, prompt_logprobs=wanted)
    return [event async for events in engine.generate(request) for event in events]


def reference_of(eager, ids):
    logits = eager(torch.tensor([ids])).logits[0, :-1]
    return torch.log_softmax(logits.double(), dim=-1).numpy()


def assert_equal(found, ids, reference, atol):
    assert found.ids.shape == found.logprobs.shape == (len(ids) - 1, 1 + TOP)
    assert found.ids[:, 0].tolist() == ids[1:]
    np.testing.assert_allclose(found.logprobs, np.take_along_axis(reference, found.ids, 1), atol=atol)
    np.testing.assert_allclose(found.logprobs[:, 1:], -np.sort(-reference, axis=1)[:, :TOP], atol=atol)


def only_prompt(events):
    (first,) = [event for event in events if event.prompt is not None]
    assert first is events[0]
    assert first.index == 0
    return first.prompt


async def test_real_weights(served, gemma_eager):
    gemma = served("gemma-3-270m", "float32")
    ids = prompt_ids(gemma.tokenizer, 60, seed=31)
    events = await events_of(gemma.engine, ids, logprobs=0, logprob_ids=(7, 1000, 7))
    assert_equal(only_prompt(events), ids, reference_of(gemma_eager, ids), 1e-3)
    tokens = [event.token_id for event in events]
    rows = reference_of(gemma_eager, [*ids, *tokens])[len(ids) - 1 :]
    for event, row in zip(events, rows, strict=True):
        assert event.selected == pytest.approx([row[7], row[1000], row[7]], abs=1e-3)
    # The continuation read as a prompt says of its tokens what was said when they were drawn.
    again = only_prompt(await events_of(gemma.engine, [*ids, *tokens], count=1))
    assert again.logprobs[len(ids) - 1 :, 0] == pytest.approx([event.logprob for event in events], abs=1e-3)


@pytest.fixture(scope="module", params=TINY)
def tiny(request, tmp_path_factory):
    """A random model, served with steps of at most 24 tokens and a cache for few sequences; and its eager twin."""
    folder = tmp_path_factory.mktemp(request.param)
    save(folder, request.param, DECODERS[request.param] | {"vocab_size": 264}, AutoModelForCausalLM)
    byte_tokenizer()._hf.save_pretrained(folder)
    settings = Settings(dtype="float32", kv_cache_bytes=2**20, max_batch_tokens=24)
    model = load_served_model(request.param, folder, settings, lambda _: None)
    yield model, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    model.engine.close()


def ids_of(length, seed):
    return [Random(seed).randrange(1, 250) for _ in range(length)] if length else []


@pytest.mark.parametrize("length", [1, 2, 23, 24, 25, 100])
async def test_chunks(tiny, length):
    model, eager = tiny
    ids = ids_of(length, length)
    # The neighbours' rows lie in the same steps.
    own, *_ = await asyncio.gather(
        events_of(model.engine, ids), *(events_of(model.engine, ids_of(30, seed), wanted=None) for seed in (1, 2))
    )
    assert_equal(only_prompt(own), ids, reference_of(eager, ids), 1e-4)


async def test_when_sequences_give_way_and_are_computed_again(tiny):
    """More than the cache holds: each prompt's numbers come once and are right, wherever it was interrupted."""
    model, eager = tiny
    prompts = [ids_of(100 + place, 50 + place) for place in range(24)]
    answers = await asyncio.gather(*(events_of(model.engine, ids, count=90) for ids in prompts))
    for ids, events in zip(prompts, answers, strict=True):
        assert len(events) == 90
        assert_equal(only_prompt(events), ids, reference_of(eager, ids), 1e-4)


async def test_a_prompt_that_the_cache_holds_is_read_all_the_same(tiny):
    model, eager = tiny
    ids = ids_of(64, 9)
    await events_of(model.engine, ids, wanted=None)
    events = await events_of(model.engine, ids, n=3)
    assert_equal(only_prompt(events), ids, reference_of(eager, ids), 1e-4)
    assert {event.cached_tokens for event in events if event.index == 0} == {0}
    after = await events_of(model.engine, [*ids, 7], wanted=None)
    assert after[0].cached_tokens == 64


async def test_what_it_computes_is_cached_for_others(tiny):
    model, _ = tiny
    ids = ids_of(64, 10)
    await events_of(model.engine, ids, n=2)
    assert (await events_of(model.engine, [*ids, 7], wanted=None))[0].cached_tokens == 64


async def test_it_changes_no_token(tiny):
    model, _ = tiny
    ids = ids_of(40, 12)
    sampled = {"temperature": 1.0, "seed": 5}
    plain = await events_of(model.engine, ids, 12, 2, None, **sampled)
    asked = await events_of(model.engine, ids, 12, 2, TOP, logprobs=2, logprob_ids=(3,), **sampled)
    assert by_index(plain) == by_index(asked)


def by_index(events):
    return {index: [event.token_id for event in events if event.index == index] for index in (0, 1)}


async def test_a_context_that_is_exactly_full(tiny):
    model, _ = tiny
    longest = min(model.info.context_length, model.info.kv_cache_tokens)
    events = await events_of(model.engine, ids_of(longest - 3, 13), count=3)
    assert [event.finish for event in events] == [None, None, FinishReason.LENGTH]
    assert len(only_prompt(events).ids) == longest - 4


async def test_through_the_service(tiny):
    """The stream's chunks put together are the unary answer, which is what eager computes."""
    model, eager = tiny
    ids = ids_of(50, 14)
    options = {"temperature": 0, "max_new_tokens": 20, "n": 2, "logprobs": TOP, "prompt_logprobs": True}
    async with serving({model.info.name: model}) as (server, _), AsyncClient(server.address) as client:
        whole = await client.complete(ids, logprob_token_ids=[3, 9], **options)
        stream = client.stream_chunks(ids, logprob_token_ids=[3, 9], chunk_tokens=7, **options)
        received = [chunk async for chunk in stream]
    assert [entry for chunk in received for entry in chunk.prompt_logprobs] == list(whole.prompt_logprobs)
    assert_equal(as_arrays(whole.prompt_logprobs), ids, reference_of(eager, ids), 1e-4)
    for completion in whole.completions:
        own = [chunk for chunk in received if chunk.index == completion.index]
        assert "".join(chunk.text for chunk in own) == completion.text
        assert [entry for chunk in own for entry in chunk.logprobs] == list(completion.logprobs)
        rows = reference_of(eager, [*ids, *completion.token_ids])[len(ids) - 1 :]
        for entry, row in zip(completion.logprobs, rows, strict=True):
            assert list(entry.selected) == pytest.approx([row[3], row[9]], abs=1e-4)


def as_arrays(entries):
    ids = [[each.token_id, *(other.token_id for other in each.top)] for each in entries]
    logprobs = [[each.logprob, *(other.logprob for other in each.top)] for each in entries]
    return PromptLogprobs(np.array(ids), np.array(logprobs))
