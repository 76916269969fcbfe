"""Guessing tokens ahead changes no answer: real models with and without it, through all that can happen to a stream."""

import asyncio
import random

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from pyruntime.config import Settings
from pyruntime.serving import load_served_model
from pyruntime.types import EmbedRequest, GenerateRequest, PoolingType, SamplingParams, StopParams
from pyruntime.v1 import generate_pb2
from tests.fake_compute import until
from tests.models.byte_model import channel_to, save_byte_model
from tests.models.rank_folders import SMALL, byte_level_tokenizer, save_model
from tests.models.test_deterministic_mix import ODD, WINDOW, circumstances
from tests.models.texts import text

BUFFER = 4
KINDS = {"full": ("qwen3", ODD), "windowed": ("mistral", WINDOW)}
SAMPLING = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 3, "logprob_ids": (5, 6, 40)},
    {"temperature": 0.3},
    {"temperature": 0.8, "top_p": 0.8, "logprobs": 0},
    {"temperature": 0.5, "top_k": 3, "min_p": 0.1},
    {"temperature": 0.0, "repetition_penalty": 1.05},
    {"temperature": 0.3, "frequency_penalty": 0.1, "presence_penalty": -0.5},
    {"temperature": 0.2, "logit_bias": ((7, 2.0), (8, -50.0))},
]


@pytest.fixture(scope="module", params=KINDS)
def pair(request, tmp_path_factory):
    """(guessing, not guessing): the same small model, whose cache is too small for many sequences."""
    folder = tmp_path_factory.mktemp("model")
    model_type, fields = KINDS[request.param]
    save_model(folder, AutoModelForCausalLM, model_type, len(byte_level_tokenizer(folder)), **fields)
    models = [
        load_served_model(
            "small",
            str(folder),
            Settings(
                dtype="float32",
                deterministic=True,
                speculation=speculation,
                max_batch_tokens=64,
                kv_cache_bytes=2**20,
                stream_buffer_tokens=BUFFER,
            ),
            lambda _: None,
        )
        for speculation in ("auto", "off")
    ]
    yield models
    for model in models:
        model.engine.close()


def random_request(draw, number):
    """A prompt that repeats itself, and one of everything that a request may ask for."""
    phrase = [draw.randrange(5, 60) for _ in range(draw.choice([2, 5, 11]))]
    prompt = (phrase * draw.choice([1, 3, 8]))[: draw.randrange(1, 90)]
    sampling = SamplingParams(**({"seed": number} | SAMPLING[number % len(SAMPLING)]))
    stops = frozenset(draw.sample(range(5, 60), draw.choice([0, 0, 4])))
    stop = StopParams(draw.choice([1, 9, 40, 60]), draw.choice([0, 7]), stops)
    wanted = draw.choice([None, None, 2])
    return GenerateRequest(prompt, sampling, stop, n=draw.choice([1, 1, 2, 4]), prompt_logprobs=wanted)


async def answer(engine, request, waits=False):
    """Every continuation's events; ``waits``: its client does not read until it is paused, or has ended."""
    stream, found = engine.generate(request), {index: [] for index in range(request.n)}
    if waits:
        await until(lambda: stream._job.paused or stream._job.done)
    async for events in stream:
        for event in events:
            prompt = event.prompt and tuple(each.tobytes() for each in event.prompt)
            found[event.index].append((event.token_id, event.finish, event.logprob, event.top, event.selected, prompt))
    return found


async def test_answers_are_the_same_bits_whatever_happens_beside_them(pair):
    (guessing, plain), draw = pair, random.Random(5)
    engine = guessing.engine
    requests = [random_request(draw, number) for number in range(48)]
    expected = [await answer(plain.engine, request) for request in requests]
    assert plain.engine.load().scheduler.num_drafted == 0
    places = list(range(len(requests)))
    draw.shuffle(places)
    while places:
        group, places = places[:3], places[3:]
        company = EmbedRequest([[draw.randrange(5, 60) for _ in range(40)]], PoolingType.MEAN, True, 64)
        with circumstances(engine, draw):
            *answers, _ = await asyncio.gather(
                *(answer(engine, requests[place], waits=draw.random() < 0.3) for place in group), engine.embed(company)
            )
            await until(lambda: engine.num_open == 0)
        for place, found in zip(group, answers, strict=True):
            assert found == expected[place], requests[place]
    load = engine.load().scheduler
    assert load.num_drafted > load.num_accepted > 200
    assert engine.num_blocks_used == 0


async def test_a_prompt_behind_an_answer_reads_what_right_and_wrong_guesses_left_in_the_cache(pair):
    """Turns of a conversation: each prompt is the last one with its answer, so its blocks are found."""
    (guessing, plain), draw = pair, random.Random(6)
    prompt, cached = [draw.randrange(5, 60) for _ in range(6)] * 3, 0
    for turn in range(6):
        request = GenerateRequest(
            list(prompt), SamplingParams(temperature=0.4, seed=turn, logprobs=2), StopParams(33), prompt_logprobs=None
        )
        stream = guessing.engine.generate(request)
        events = [event async for events in stream for event in events]
        assert [(e.token_id, e.logprob, e.top) for e in events] == [
            (token, logprob, top) for token, _, logprob, top, *_ in (await answer(plain.engine, request))[0]
        ]
        cached += events[0].cached_tokens
        prompt += [event.token_id for event in events]
    assert cached > 150


async def test_greedy_tokens_of_real_weights_in_a_text_that_repeats(served, gemma_eager):
    model = served("gemma-3-270m", "float32")
    paragraph = text(1, 40)
    ids = model.tokenizer.encode(f"{paragraph}. {paragraph}. {paragraph[:60]}")
    before = model.engine.load().scheduler.num_accepted
    found = (await answer(model.engine, GenerateRequest(ids, SamplingParams(temperature=0.0), StopParams(24))))[0]
    expected = gemma_eager.generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), max_new_tokens=24,
        min_new_tokens=24, do_sample=False, eos_token_id=None,
    )  # fmt: skip
    assert [token for token, *_ in found] == expected[0, len(ids) :].tolist()
    assert model.engine.load().scheduler.num_accepted - before > 12


async def test_batches_that_are_not_row_invariant_give_the_same_tokens_within_rounding(tmp_path):
    save_model(tmp_path, AutoModelForCausalLM, "qwen3", len(byte_level_tokenizer(tmp_path)), **SMALL)
    answers = []
    for speculation in ("auto", "off"):
        settings = Settings(dtype="float32", speculation=speculation, kv_cache_bytes=2**22)
        model = load_served_model("small", str(tmp_path), settings, lambda _: None)
        draw = random.Random(8)
        requests = [random_request(draw, number) for number in range(16)]
        answers.append([await answer(model.engine, request) for request in requests])
        accepted = model.engine.load().scheduler.num_accepted
        model.engine.close()
        assert (accepted > 50) == (speculation == "auto")
    for ours, theirs in zip(*answers, strict=True):
        for index, events in theirs.items():
            assert [event[:2] for event in ours[index]] == [event[:2] for event in events]
            logprobs = [[event[2] or 0.0 for event in each] for each in (ours[index], events)]
            np.testing.assert_allclose(*logprobs, atol=1e-4)


async def test_texts_stop_strings_and_chunks_through_the_service(tmp_path):
    """Several tokens of one step may hold a stop string, its beginning, or half of one; unary and stream agree."""
    save_byte_model(tmp_path)
    draw = random.Random(3)
    messages = []
    for number in range(12):
        stop = {"max_new_tokens": 60, "strings": [chr(draw.randrange(33, 120)) * draw.choice([1, 2]) for _ in range(3)]}
        sampling = {"temperature": number % 3 * 0.2, "seed": number}
        prompt = {"text": "".join(draw.choices("abc ", k=5)) * 6}
        options = {
            "n": 1 + number % 3,
            "chunk_tokens": [1, 3, 100][number % 3],
            "logprobs": {"enabled": True, "top": 1},
        }
        messages.append(generate_pb2.GenerateRequest(stop=stop, sampling=sampling, **prompt, **options))
    answers = []
    for speculation in ("auto", "off"):
        settings = Settings(dtype="float32", deterministic=True, speculation=speculation, kv_cache_bytes=2**24)
        model = load_served_model("bytes", str(tmp_path), settings, lambda _: None)
        async with channel_to(model) as stub:
            answers.append([await both_forms(stub, message) for message in messages])
        accepted = model.engine.load().scheduler.num_accepted
        model.close()
        assert (accepted > 50) == (speculation == "auto")
    assert answers[0] == answers[1]
    matched = [each.matched_stop for completions in answers[0] for each in completions]
    assert any(matched)
    assert not all(matched)


async def both_forms(stub, message):
    """The completions of the unary form, which the stream's chunks say too."""
    completions = list((await stub.Generate(message)).completions)
    streamed = [generate_pb2.Completion(index=each.index) for each in completions]
    async for chunk in stub.GenerateStream(message):
        own = streamed[chunk.index]
        own.text += chunk.text
        own.token_ids.extend(chunk.token_ids)
        own.logprobs.extend(chunk.logprobs)
        own.finish_reason, own.matched_stop = chunk.finish_reason, chunk.matched_stop
    assert streamed == completions
    return completions
