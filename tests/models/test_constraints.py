"""Constrained generation over a real channel: how constraints meet sampling, ends, several continuations and faults."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections import Counter

import grpc
import jsonschema
import pytest
import torch
from transformers import AutoModelForCausalLM

from pyruntime.config import Settings
from pyruntime.constraints.matcher import Matcher
from pyruntime.jobs.generate import GenerateJob
from pyruntime.serving import load_served_model
from pyruntime.v1 import generate_pb2
from tests.fakes import BOS, EOS
from tests.models.byte_model import channel_to, save_byte_model

STOP, LENGTH = generate_pb2.FINISH_REASON_STOP, generate_pb2.FINISH_REASON_LENGTH


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_byte_model(tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="module")
def model(folder):
    model = load_served_model("bytes", str(folder), Settings(dtype="float32", kv_cache_bytes=2**24), lambda _: None)
    yield model
    model.close()


@pytest.fixture
async def stub(model):
    async with channel_to(model) as stub:
        yield stub


def request(constraint: dict, stop: dict | None = None, **fields) -> generate_pb2.GenerateRequest:
    return generate_pb2.GenerateRequest(text="x", constraint=constraint, stop=stop, **fields)


async def completions(stub, message: generate_pb2.GenerateRequest) -> list[generate_pb2.Completion]:
    """Of the unary form; the streamed one says the same."""
    answer = list((await stub.Generate(message)).completions)
    parts: dict[int, list[generate_pb2.GenerateChunk]] = {each.index: [] for each in answer}
    async for chunk in stub.GenerateStream(message):
        parts[chunk.index].append(chunk)
    for each in answer:
        chunks = parts[each.index]
        assert "".join(chunk.text for chunk in chunks) == each.text
        assert [token for chunk in chunks for token in chunk.token_ids] == list(each.token_ids)
        assert chunks[-1].finish_reason == each.finish_reason
    return answer


async def refusal(stub, message) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Generate(message)
    return caught.value


SAMPLING = {
    "plain": {},
    "hot": {"temperature": 50},
    "filtered": {"top_k": 3, "top_p": 0.5, "min_p": 0.1},
    "penalties": {"repetition_penalty": 1.9, "frequency_penalty": 2, "presence_penalty": 2},
    "against the constraint": {"logit_bias": {ord("z"): 90, EOS: 90, ord("a"): -90}},
    "greedy": {"temperature": 0},
}


@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING)
async def test_every_draw_is_allowed(stub, sampling):
    message = request({"regex": "[ab]{3,6}(c|dd)"}, n=24, sampling={"seed": 3, **sampling})
    answers = await completions(stub, message)
    assert [each.finish_reason for each in answers] == [STOP] * 24
    assert all(re.fullmatch("[ab]{3,6}(c|dd)", each.text) for each in answers)
    if sampling.get("temperature") != 0:
        assert len({each.text for each in answers}) > 3


async def test_greedy_is_the_likeliest_allowed_token_and_logprobs_stay_the_models_own(stub, folder):
    options = ["north", "south", "southwest", "nose"]
    sampling = generate_pb2.Sampling(temperature=0)
    (answer,) = await completions(
        stub, request({"choice": {"options": options}}, sampling=sampling, logprobs={"enabled": True, "top": 2})
    )
    eager = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    ids, spelled = [BOS, ord("x")], ""
    while True:
        allowed = {ord(each[len(spelled)]) for each in options if each.startswith(spelled) and each != spelled}
        if not allowed:
            break
        allowed |= {EOS} if spelled in options else set()
        scores = torch.log_softmax(eager(torch.tensor([ids])).logits[0, -1], -1)
        best = max(allowed, key=lambda token: float(scores[token]))
        entry = answer.logprobs[len(ids) - 2]
        assert entry.token_id == best
        assert entry.logprob == pytest.approx(float(scores[best]), abs=1e-4)
        assert [top.token_id for top in entry.top] == scores.topk(2).indices.tolist()
        if best == EOS:
            break
        ids.append(best)
        spelled += chr(best)
    assert answer.text == spelled
    assert answer.finish_reason == STOP


async def test_draws_follow_the_distribution_over_what_is_allowed(stub, folder):
    eager = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    logits = eager(torch.tensor([[BOS, ord("x")]])).logits[0, -1]
    expected = torch.softmax(logits[[ord(c) for c in "abc"]], -1).tolist()
    message = request({"regex": "[abc]"}, n=128)
    counts: Counter[str] = Counter()
    for seed in range(16):
        message.sampling.seed = seed
        counts.update(each.text for each in (await stub.Generate(message)).completions)
    total = counts.total()
    assert set(counts) == set("abc")
    for letter, share in zip("abc", expected, strict=True):
        assert counts[letter] / total == pytest.approx(share, abs=5 * (share * (1 - share) / total) ** 0.5)


ENDS = [
    # (regex, stop, text, finish)
    ("a{3}", {}, "aaa", STOP),
    ("a{3}", {"ignore_eos": True}, "aaa", STOP),
    ("a{3}", {"min_new_tokens": 5, "max_new_tokens": 9}, "aaa", STOP),
    ("a{3}", {"max_new_tokens": 3}, "aaa", STOP),
    ("a{3}", {"max_new_tokens": 2}, "aa", LENGTH),
    ("a+", {"ignore_eos": True, "max_new_tokens": 7}, "aaaaaaa", LENGTH),
    ("a+", {"min_new_tokens": 7, "max_new_tokens": 7}, "aaaaaaa", LENGTH),
    ("aaab+", {"token_ids": [ord("b")]}, "aaa", STOP),
    ("aaab+", {"strings": ["ab"], "include_stop_in_text": True}, "aaab", STOP),
    ("aaab", {"strings": ["ab"]}, "aa", STOP),
]


@pytest.mark.parametrize(("regex", "stop", "text", "finish"), ENDS)
async def test_ends(stub, regex, stop, text, finish):
    (answer,) = await completions(stub, request({"regex": regex}, stop, sampling={"seed": 1}))
    assert (answer.text, answer.finish_reason) == (text, finish)


async def test_an_optional_end_comes_as_the_end_of_sequence_token(stub):
    message = request({"regex": "ab*"}, sampling={"seed": 1, "logit_bias": {EOS: 50}})
    (answer,) = await completions(stub, message)
    assert (answer.text, answer.finish_reason, list(answer.token_ids)) == ("a", STOP, [ord("a"), EOS])


async def test_a_minimum_that_only_stop_tokens_could_reach_is_an_error(stub):
    stop = {"token_ids": [ord("a")], "min_new_tokens": 4}
    error = await refusal(stub, request({"regex": "bba+"}, stop))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details() == (
        "stop.min_new_tokens: 4 cannot be reached: after 2 tokens the constraint lets only stop tokens follow"
    )


async def test_a_text_that_becomes_too_costly_to_follow_fails_alone(stub, monkeypatch):
    """The ways to read it grow with its length. Most of the work is not the step thread's, where others wait."""
    spent: Counter[str] = Counter()
    advance = Matcher.advance

    def counted(self, token_id):
        start = time.thread_time()
        try:
            return advance(self, token_id)
        finally:
            spent[threading.current_thread().name.split("-")[0].split("_")[0]] += time.thread_time() - start

    monkeypatch.setattr(Matcher, "advance", counted)
    ambiguous = {"grammar": 'start: s\ns: s s | s s s | s s s s | "a" | "b"'}
    hard = request(ambiguous, {"ignore_eos": True, "max_new_tokens": 500}, sampling={"seed": 1})
    easy = request({"regex": "(ab){40}"}, sampling={"seed": 1})
    error, answer = await asyncio.gather(stub.Generate(hard), stub.Generate(easy), return_exceptions=True)
    assert answer.completions[0].text == "ab" * 40
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details().startswith("constraint.grammar: ")
    assert "too costly to follow" in error.details() or "cannot be followed" in error.details()
    assert set(spent) == {"device", "follow"}
    assert spent["follow"] > 4 * spent["device"]


class Flaky:
    """Heads that fail after every third reading, when the tokens have been drawn already."""

    def __init__(self, heads):
        self.heads, self.calls, self.failures = heads, 0, 0

    def read(self, hidden, batch):
        outputs = self.heads.read(hidden, batch)
        self.calls += 1
        if len({row.sequence.owner for row in batch.rows}) > 1 and self.calls % 3 == 0:
            self.failures += 1
            raise RuntimeError("flaky")
        return outputs


async def test_a_step_that_is_run_again_does_not_move_a_constraint_twice(stub, model, monkeypatch):
    messages = [request({"regex": "(ab|cd){20}e"}, sampling={"seed": seed}) for seed in range(4)]
    expected = [(await stub.Generate(each)).completions[0].text for each in messages]
    flaky = Flaky(model.engine._steps._heads)
    monkeypatch.setattr(model.engine._steps, "_heads", flaky)
    answers = await asyncio.gather(*(stub.Generate(each) for each in messages))
    assert flaky.failures > 3
    assert [each.completions[0].text for each in answers] == expected
    assert all(re.fullmatch("(ab|cd){20}e", text) for text in expected)


async def test_a_sequence_that_was_set_back_goes_on_where_it_was(folder, monkeypatch):
    starts: Counter[int] = Counter()
    take = GenerateJob.take

    def noting(self, sequence, output, scheduler):
        starts[sequence.num_starts] += 1
        take(self, sequence, output, scheduler)

    monkeypatch.setattr(GenerateJob, "take", noting)
    settings = Settings(dtype="float32", kv_cache_bytes=2**20)  # 4096 tokens
    model = load_served_model("bytes", str(folder), settings, lambda _: None)
    async with channel_to(model) as stub:
        message = request({"regex": "(ab|cd){60}e"}, n=64, sampling={"seed": 5})
        answers = await completions(stub, message)
    model.close()
    assert max(starts) > 1
    assert all(re.fullmatch("(ab|cd){60}e", each.text) for each in answers)


GEMMA_SCHEMAS = [
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 120}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 2, "maxItems": 4},
    {"enum": ["yes", "no", 3.5, None]},
    {"type": "string", "format": "date"},
    {
        "type": "object",
        "properties": {"tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "maxItems": 3}},
        "required": ["tags"],
        "additionalProperties": False,
        "$defs": {"tag": {"anyOf": [{"type": "boolean"}, {"type": "string", "pattern": "^[a-z]{2,8}$"}]}},
    },
]


async def test_real_weights_write_what_the_schema_says(served):
    gemma = served("gemma-3-270m", "float32")
    async with channel_to(gemma) as stub:
        messages = []
        for seed, schema in enumerate(GEMMA_SCHEMAS):
            sampling = generate_pb2.Sampling(seed=seed, temperature=0 if seed % 2 else 1)
            prompt = f"Answer in JSON. Schema: {json.dumps(schema)}\nAnswer: "
            text = generate_pb2.GenerateRequest(text=prompt, sampling=sampling, stop={"max_new_tokens": 300})
            text.constraint.json_schema = json.dumps(schema)
            messages.append(text)
        answers = await asyncio.gather(*(stub.Generate(each) for each in messages))
    for schema, answer in zip(GEMMA_SCHEMAS, answers, strict=True):
        (completion,) = answer.completions
        assert completion.finish_reason == STOP
        validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
        validator.validate(json.loads(completion.text))
