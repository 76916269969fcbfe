"""Requests at the edges of what is allowed, through the whole service over a real model: each is answered, exactly."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import grpc
import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from pyruntime import serving
from pyruntime.config import Settings
from pyruntime.errors import ModelLoadError
from pyruntime.serving import load_served_model
from pyruntime.v1 import generate_pb2
from tests.fakes import byte_tokenizer
from tests.models.byte_model import CONTEXT, channel_to, save_byte_model

LARGEST = float(np.finfo(np.float32).max)
PROMPT = "hello there"
STOP, LENGTH = generate_pb2.FINISH_REASON_STOP, generate_pb2.FINISH_REASON_LENGTH


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = save_byte_model(tmp_path_factory.mktemp("edges"))
    model = load_served_model("edges", folder, Settings(dtype="float32"), lambda _: None)
    yield model, LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    model.engine.close()


@pytest.fixture
async def stub(pair):
    async with channel_to(pair[0]) as stub:
        yield stub


def request(count=6, sampling=None, **fields) -> generate_pb2.GenerateRequest:
    stop = {"max_new_tokens": count, "ignore_eos": True}
    given = {"text": PROMPT, "stop": stop, "sampling": {"seed": 1} | (sampling or {})} | fields
    return generate_pb2.GenerateRequest(**{name: value for name, value in given.items() if value is not None})


async def tokens(stub, **given) -> list[int]:
    return list((await stub.Generate(request(**given))).completions[0].token_ids)


@pytest.mark.parametrize(
    ("extreme", "ordinary"),
    [
        # (a value at the edge, one that must give the same tokens)
        ({"temperature": 1e-45}, {"temperature": 0}),
        ({"temperature": 1e-30}, {"temperature": 0}),
        ({"top_p": 1e-45}, {"temperature": 0}),
        ({"min_p": 1.0}, {"temperature": 0}),
        ({"top_k": 1}, {"temperature": 0}),
        ({"top_k": 2**31 - 1, "top_p": 1.0, "min_p": 1e-45}, {}),
        ({"repetition_penalty": 1e-45}, {"repetition_penalty": 1e-20}),
        ({"logit_bias": {65: LARGEST}}, {"logit_bias": {65: 1000.0}}),
        ({"logit_bias": {65: LARGEST, 66: -LARGEST}, "temperature": 1e-45}, {"logit_bias": {65: 1000.0}}),
        ({"logit_bias": {i: -LARGEST for i in range(260) if i != 65}}, {"logit_bias": {65: 1000.0}}),
        ({"logit_bias": {65: 3e38, 66: LARGEST}}, {"logit_bias": {66: 1000.0}}),
        ({"logit_bias": {104: LARGEST}, "repetition_penalty": 1e-45}, {"logit_bias": {104: 1e35}}),
    ],
    ids=lambda given: str(given)[:50],
)
async def test_extreme_values(stub, extreme, ordinary):
    assert await tokens(stub, sampling=extreme) == await tokens(stub, sampling=ordinary)


async def test_an_extreme_request_disturbs_no_other(stub):
    """In one batch with them."""
    extreme = [{"repetition_penalty": 1e-45}, {"logit_bias": {65: LARGEST}}, {"temperature": 1e-45}]
    alone = await tokens(stub, count=30)
    answers = await asyncio.gather(tokens(stub, count=30), *(tokens(stub, count=30, sampling=each) for each in extreme))
    assert answers[0] == alone


async def test_all_tokens_but_one_end_it(stub):
    stop = {"max_new_tokens": 5, "min_new_tokens": 5, "token_ids": [i for i in range(260) if i != 7]}
    (completion,) = (await stub.Generate(request(stop=stop))).completions
    assert (list(completion.token_ids), completion.finish_reason) == ([7] * 5, LENGTH)


@pytest.mark.parametrize("length", [1, CONTEXT - 17, CONTEXT - 2, CONTEXT - 1])
async def test_the_context_is_filled_to_its_last_token(pair, stub, length):
    """Without a limit of its own a continuation ends where the context does; its tokens are what eager says."""
    ids = np.random.default_rng(length).integers(0, 256, length).tolist()
    given = {"text": None, "token_ids": {"ids": ids}, "sampling": {"temperature": 0}, "stop": {"ignore_eos": True}}
    answer = await stub.Generate(request(**given))
    (completion,) = answer.completions
    assert completion.finish_reason == LENGTH
    assert answer.usage.prompt_tokens + answer.usage.completion_tokens == CONTEXT
    logits = pair[1](torch.tensor([[*ids, *completion.token_ids[:-1]]])).logits[0, length - 1 :]
    gaps = logits.max(-1).values - logits.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    assert gaps.max() < 1e-4
    chunks = [chunk async for chunk in stub.GenerateStream(request(**given))]
    assert [token for chunk in chunks for token in chunk.token_ids] == list(completion.token_ids)
    assert chunks[-1].finish_reason == LENGTH


@pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 1, 5000])
async def test_a_prompt_that_leaves_no_room(stub, length):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Generate(request(text=None, token_ids={"ids": [5] * length}))
    said = f"has {length} tokens; allowed: at most {CONTEXT - 1}, so that one more fits the context of {CONTEXT}"
    assert said in caught.value.details()


async def test_a_cache_smaller_than_the_context(tmp_path):
    """One sequence may have all of it."""
    settings = Settings(dtype="float32", kv_cache_bytes=2**20)
    model = load_served_model("small", save_byte_model(tmp_path, context=2**15), settings, lambda _: None)
    room = model.info.context_length
    assert room <= model.info.kv_cache_tokens < 2**15
    async with channel_to(model) as stub:
        with pytest.raises(grpc.aio.AioRpcError, match=f"has {room} tokens; allowed: at most {room - 1},.* of {room}"):
            await stub.Generate(request(text=None, token_ids={"ids": [5] * room}))
        with pytest.raises(grpc.aio.AioRpcError, match=f"1 to {room - 9} behind a prompt of 9 tokens .context {room}"):
            await stub.Generate(request(text="12345678", count=room))
        assert len(await tokens(stub, text=None, token_ids={"ids": [5] * (room - 3)}, count=3)) == 3
    model.engine.close()


async def test_prompt_logprobs_from_a_cached_prefix_of_several_streams(pair, stub):
    """Once, before everything else, the same whatever the cache held, streamed or whole; n continuations share them."""
    ids = np.random.default_rng(3).integers(0, 256, 100).tolist()
    fields = {"text": None, "token_ids": {"ids": ids}, "n": 3, "chunk_tokens": 100}
    logprobs = {"enabled": True, "prompt": True, "top": 20, "token_ids": [3]}
    plain = await stub.Generate(request(**fields))
    first = await stub.Generate(request(**fields, logprobs=logprobs))
    chunks = [chunk async for chunk in stub.GenerateStream(request(**fields, logprobs=logprobs))]
    streamed = [entry for chunk in chunks for entry in chunk.prompt_logprobs]
    assert streamed == list(first.prompt_logprobs)
    assert [bool(chunk.prompt_logprobs) for chunk in chunks] == [True] + [False] * (len(chunks) - 1)
    reference = torch.log_softmax(pair[1](torch.tensor([ids])).logits[0, :-1].double(), -1).numpy()
    for place, entry in enumerate(streamed):
        assert entry.token_id == ids[place + 1]
        assert entry.logprob == pytest.approx(reference[place, entry.token_id], abs=1e-4)
        assert [each.logprob for each in entry.top] == pytest.approx(-np.sort(-reference[place])[:20], abs=1e-4)
    assert [list(each.token_ids) for each in first.completions] == [list(each.token_ids) for each in plain.completions]
    for completion in first.completions:
        own = [chunk for chunk in chunks if chunk.index == completion.index and not chunk.prompt_logprobs]
        assert [entry for chunk in own for entry in chunk.logprobs] == list(completion.logprobs)
        assert "".join(chunk.text for chunk in own) == completion.text


def test_a_model_whose_own_values_no_request_could_have_is_refused(tmp_path):
    file = save_byte_model(tmp_path) / "generation_config.json"
    loaded = SimpleNamespace(config=None)
    for values, says in (
        ({"temperature": -1}, "temperature -1 is out of range; allowed: 0 to 100"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty nan is out of range"),
        ({"min_p": "low"}, "min_p 'low' is out of range"),
        ({"top_k": 1.5}, "top_k 1.5 is no whole number"),
        ({"top_p": 0.0}, "top_p 0.0 is out of range; allowed: above 0 to 1"),
    ):
        file.write_text(json.dumps(values))
        with pytest.raises(ModelLoadError, match=says):
            serving._generation_defaults(tmp_path, loaded, byte_tokenizer())
    with pytest.raises(ModelLoadError, match=says):
        load_served_model("bad", tmp_path, Settings(dtype="float32", self_check=False), lambda _: None)


async def test_a_models_own_values_are_the_defaults(tmp_path):
    save_byte_model(tmp_path)
    own = {"do_sample": True, "temperature": 0.0, "top_k": None, "eos_token_id": [7, 9]}
    (tmp_path / "generation_config.json").write_text(json.dumps(own))
    model = load_served_model("own", tmp_path, Settings(dtype="float32", self_check=False), lambda _: None)
    async with channel_to(model) as stub:
        greedy = await tokens(stub, sampling={"temperature": 0, "seed": 3})
        assert await tokens(stub) == greedy
        stopped = request(sampling={"temperature": 1, "logit_bias": {9: 1000.0}}, stop={"max_new_tokens": 5})
        (completion,) = (await stub.Generate(stopped)).completions
        assert (list(completion.token_ids), completion.finish_reason, completion.matched_stop) == ([9], STOP, "")
    model.engine.close()
