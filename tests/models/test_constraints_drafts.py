"""Guesses within constraints change no answer, nor does where these are followed: forced texts and repeated ones."""

from __future__ import annotations

import json
import random

import pytest

from pyruntime.config import Settings
from pyruntime.constraints import matcher
from pyruntime.serving import load_served_model
from pyruntime.v1 import generate_pb2
from tests.fakes import EOS
from tests.models.byte_model import channel_to, save_byte_model
from tests.models.test_speculation import both_forms

SCHEMA = {
    "type": "object",
    "properties": {
        "customer": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["business", "private"]},
        "numbers": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
    },
    "required": ["customer", "kind", "numbers"],
    "additionalProperties": False,
}
COMPACT = SCHEMA | {"x-guidance": {"whitespace_flexible": False}}
CONSTRAINTS = [
    {"json_schema": json.dumps(SCHEMA)},
    {"json_schema": json.dumps(COMPACT)},
    {"json_schema": "{}"},
    {"regex": "(abcabc[a-d]){3,6}(the end)?"},
    {"regex": "[a-c ]*"},
    {"choice": {"options": ["a longer option", "a longer text", "another"]}},
    {"grammar": 'start: ("<row>" /[a-z]{1,3}/ "</row>")+'},
]
SAMPLING = [
    {"temperature": 0},
    {"temperature": 0.7},
    {"temperature": 1.5, "top_k": 5},
    {"temperature": 0, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
    {"temperature": 1, "logit_bias": {ord("a"): 3, ord('"'): 2, EOS: 1}},
]
STOPS = [{}, {"min_new_tokens": 20}, {"ignore_eos": True}, {"strings": ["cab", "r<"]}, {"token_ids": [ord("d")]}]


def requests() -> list[generate_pb2.GenerateRequest]:
    draw = random.Random(4)
    found = []
    for number in range(21):
        stop = {"max_new_tokens": draw.choice([1, 9, 60]), **draw.choice(STOPS)}
        stop["min_new_tokens"] = min(stop.get("min_new_tokens", 0), stop["max_new_tokens"])
        found.append(
            generate_pb2.GenerateRequest(
                text=draw.choice(['{"customer": "abc", "kind": ', "abcabcd abcabcd ", "x"]) * 2,
                constraint=CONSTRAINTS[number % len(CONSTRAINTS)],
                sampling={"seed": number, **SAMPLING[number % len(SAMPLING)]},
                stop=stop,
                n=draw.choice([1, 1, 3]),
                logprobs={"enabled": number % 2 == 0, "top": number % 4 // 2 * 3 if number % 2 == 0 else 0},
            )
        )
    return found


async def answers(folder, speculation: str):
    """(the completions of each request, drafts that were right); an error stands for its code and text."""
    settings = Settings(dtype="float32", deterministic=True, speculation=speculation, kv_cache_bytes=2**24)
    model = load_served_model("bytes", str(folder), settings, lambda _: None)
    try:
        async with channel_to(model) as stub:
            found = [await both_forms(stub, message) for message in requests()]
        return found, model.engine.load().scheduler.num_accepted
    finally:
        model.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_byte_model(tmp_path_factory.mktemp("bytes"))


async def test_answers_are_the_same_with_and_without(folder, monkeypatch):
    plain, none = await answers(folder, "off")
    guessed, accepted = await answers(folder, "auto")
    assert none == 0
    assert accepted > 150
    monkeypatch.setattr(matcher.Constraint, "is_costly", True)  # every token is followed aside of the steps
    followed, none = await answers(folder, "auto")
    assert none == 0
    for theirs, ours, slow, message in zip(plain, guessed, followed, requests(), strict=True):
        assert ours == theirs, message
        assert slow == theirs, message
