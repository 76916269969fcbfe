"""Sampling fields on their way to the engine, and log-probabilities on their way back."""

from __future__ import annotations

import pytest

from pyruntime.registry import GenerationDefaults
from pyruntime.types import FinishReason, TokenEvent
from pyruntime.v1 import generate_pb2
from tests.fakes import EOS, FakeStream
from tests.service.conftest import Stack

LENGTH = FinishReason.LENGTH


def request(logprobs: generate_pb2.LogprobOptions | None = None, **sampling) -> generate_pb2.GenerateRequest:
    return generate_pb2.GenerateRequest(text="hi", sampling=generate_pb2.Sampling(**sampling), logprobs=logprobs)


async def sent(stack: Stack, message: generate_pb2.GenerateRequest):
    await stack.generate.Generate(message)
    return stack.engine.generated[-1].sampling


async def test_every_sampling_field_reaches_the_engine(stack: Stack):
    params = await sent(
        stack,
        request(
            temperature=0.5,
            top_k=7,
            top_p=0.25,
            min_p=0.125,
            seed=2**64 - 1,
            repetition_penalty=1.5,
            frequency_penalty=-0.5,
            presence_penalty=2,
            logit_bias={9: -4, 3: 8},
        ),
    )
    assert (params.temperature, params.top_k, params.top_p, params.min_p, params.seed) == (
        0.5,
        7,
        0.25,
        0.125,
        2**64 - 1,
    )
    assert (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) == (1.5, -0.5, 2)
    assert params.logit_bias == ((3, 8.0), (9, -4.0))
    assert params.logprobs is None


async def test_the_models_own_repetition_penalty_holds_unless_the_client_sets_one(stack: Stack):
    stack.decoder.generation_defaults = GenerationDefaults(repetition_penalty=1.25, eos_token_ids=frozenset({EOS}))
    assert (await sent(stack, request())).repetition_penalty == 1.25
    assert (await sent(stack, request(repetition_penalty=1))).repetition_penalty == 1.0


@pytest.mark.parametrize(
    ("options", "expected"), [({}, None), ({"enabled": True}, 0), ({"enabled": True, "top": 3}, 3)]
)
async def test_logprobs_are_asked_for_as_the_client_says(stack: Stack, options, expected):
    params = await sent(stack, request(generate_pb2.LogprobOptions(**options)))
    assert params.logprobs == expected


async def test_logprobs_come_back_with_text_in_both_forms(stack: Stack):
    def stream() -> FakeStream:
        top = ((ord("b"), -0.25), (ord("a"), -1.5))
        first = TokenEvent(0, ord("a"), logprob=-1.5, top=top)
        return FakeStream([[first, TokenEvent(0, ord("c"), logprob=-2.0)], [TokenEvent(0, EOS, LENGTH, logprob=-3.0)]])

    message = request(generate_pb2.LogprobOptions(enabled=True, top=2))
    stack.engine.next_stream = stream()
    (completion,) = (await stack.generate.Generate(message)).completions
    stack.engine.next_stream = stream()
    chunks = [chunk async for chunk in stack.generate.GenerateStream(message)]
    assert [token for chunk in chunks for token in chunk.logprobs] == list(completion.logprobs)
    assert [token.token_id for token in completion.logprobs] == list(completion.token_ids)
    assert [(token.text, token.logprob) for token in completion.logprobs] == [("a", -1.5), ("c", -2.0), ("</s>", -3.0)]
    alternatives = [(other.token_id, other.text, other.logprob) for other in completion.logprobs[0].top]
    assert alternatives == [(ord("b"), "b", -0.25), (ord("a"), "a", -1.5)]
