"""Every field of a GenerateRequest: what is out of range is refused by name, what is at the edge of it is served."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

import grpc
import pytest
from google.protobuf.descriptor import Descriptor
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from pyruntime.registry import GenerationDefaults
from pyruntime.service.chat import RESERVED_TEMPLATE_NAMES
from pyruntime.types import TokenEvent
from pyruntime.v1 import generate_pb2
from tests.fakes import VOCAB, FakeStream, play
from tests.service.bad_requests import BAD_GENERATE, chat, generate, sampling, stop
from tests.service.conftest import Stack, failure_of

INF, NAN = float("inf"), float("nan")
ENDLESS = 3.4028234663852886e38  # the largest float32
NEXT = 1 + 2**-20
FLOATS = {
    "temperature": ("0 to 100", [-1e-30, 100 * NEXT, -INF, INF, NAN]),
    "top_p": ("above 0, at most 1", [0, -1e-30, NEXT, -INF, INF, NAN]),
    "min_p": ("0 to 1", [-1e-30, NEXT, -INF, INF, NAN]),
    "repetition_penalty": ("above 0, at most 2", [0, -1e-30, 2 * NEXT, -INF, INF, NAN]),
    "frequency_penalty": ("-2 to 2", [-2 * NEXT, 2 * NEXT, -INF, INF, NAN]),
    "presence_penalty": ("-2 to 2", [-2 * NEXT, 2 * NEXT, -INF, INF, NAN]),
}
BAD = [
    *BAD_GENERATE,
    *[
        (sampling(**{name: value}), f"sampling.{name}", f"{value:g} is out of range; allowed: {allowed}")
        for name, (allowed, values) in FLOATS.items()
        for value in values
    ],
    *[(sampling(logit_bias={7: value}), "sampling.logit_bias[7]", "finite numbers") for value in (INF, -INF, NAN)],
    (sampling(logit_bias={2**32 - 1: 0.0}), f"sampling.logit_bias[{2**32 - 1}]", f"allowed: 0 to {VOCAB - 1}"),
    (sampling(top_k=-(2**31)), "sampling.top_k", "-2147483648 is out of range; allowed: -1 or more"),
    (generate(n=2**32 - 1), "n", "4294967295 is out of range; allowed: 1 to 128"),
    (generate(chunk_tokens=2**32 - 1), "chunk_tokens", "4294967295 is out of range; allowed: 1 to 1024"),
    (generate(request_id="日" * 86), "request_id", "has 258 bytes; allowed: at most 256"),
    (generate(logprobs={"enabled": True, "top": 2**32 - 1}), "logprobs.top", "4294967295 is out of range"),
    (stop(max_new_tokens=2**32 - 1), "stop.max_new_tokens", "4294967295 is out of range; allowed: 1 to 61"),
    (stop(min_new_tokens=62), "stop.min_new_tokens", "62 is out of range; allowed: 0 to 61"),
    (stop(strings=["日" * 342]), "stop.strings[0]", "has 1026 bytes; allowed: 1 to 1024"),
    (stop(token_ids=[1, 2**32 - 1]), "stop.token_ids[1]", f"is outside the vocabulary; allowed: 0 to {VOCAB - 1}"),
    (generate(text="", token_ids={"ids": [3] * 64}), "prompt", "has 64 tokens; allowed: at most 63"),
    (generate(constraint={"choice": {}}), "constraint.choice.options", "is empty; allowed: at least one text"),
    (generate(constraint={"choice": {"options": ["a", ""]}}), "constraint.choice.options[1]", "is empty"),
    *[
        (generate(constraint={kind: ""}), f"constraint.{kind}", "is empty")
        for kind in ("json_schema", "regex", "grammar")
    ],
    *[
        (chat({"role": "u"}, template_arguments={name: 1}), "chat.template_arguments", "cannot be set; allowed: names")
        for name in ("messages", "chat_template", "sanitize_control_tokens", "_x", "a b", "", "x" * 65, "1a", "é")
    ],
]
# Fields of which every value that a message can hold is allowed, or whose name is an error of another kind.
ANY_VALUE = {
    "model": "NOT_FOUND, in test_errors.py",
    "sampling.seed": "any number",
    "priority": "any number",
    "stop.ignore_eos": "either",
    "stop.include_stop_in_text": "either",
    "logprobs.enabled": "either",
    "chat.allow_control_tokens": "either",
    "chat.continue_final_message": "either; what must go with it has paths of its own",
}


def leaves(descriptor: Descriptor, prefix: str = "") -> Iterator[str]:
    for field in descriptor.fields:
        message, path = field.message_type, prefix + field.name
        is_map = message is not None and message.GetOptions().map_entry
        if message is None or is_map or message.file.name.startswith("google/"):
            yield path
        else:
            yield from leaves(message, f"{path}.")


def test_no_field_is_left_out():
    tested = {re.sub(r"\[\d+\]", "", path) for _, path, _ in BAD}
    fields = set(leaves(generate_pb2.GenerateRequest.DESCRIPTOR))
    assert fields - tested == set(ANY_VALUE)
    groups = {
        "prompt",
        "chat",
        "chat.messages",
        "constraint",
        "token_ids",
    }  # what is wrong with several fields together
    assert tested - fields == groups


@pytest.mark.parametrize(("request_", "field", "problem"), BAD[len(BAD_GENERATE) :], ids=lambda given: str(given)[:40])
async def test_bad_fields_are_named(stack: Stack, request_, field, problem):
    for call in (stack.generate.Generate(request_), stack.generate.GenerateStream(request_)):
        failure = await failure_of(call)
        assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
        assert list(failure.violations) == [field]
        assert problem in failure.violations[field]
        assert "allowed" in failure.violations[field]
    assert stack.engine.generated == []


EDGES = [
    *[sampling(temperature=value) for value in (0, 1e-45, 100)],
    *[sampling(top_p=value) for value in (1e-45, 1)],
    *[sampling(min_p=value) for value in (0, 1e-45, 1)],
    *[sampling(repetition_penalty=value) for value in (1e-45, 2)],
    *[sampling(frequency_penalty=value, presence_penalty=-value) for value in (-2, 2)],
    *[sampling(top_k=value) for value in (-1, 0, 1, 2**31 - 1)],
    *[sampling(seed=value) for value in (0, 2**64 - 1)],
    *[sampling(logit_bias={0: value, VOCAB - 1: -value}) for value in (0, ENDLESS)],
    sampling(logit_bias=dict.fromkeys(range(VOCAB), 1.0)),
    *[generate(n=value) for value in (1, 128)],
    *[generate(priority=value) for value in (-(2**31), 2**31 - 1)],
    *[generate(chunk_tokens=value) for value in (1, 1024)],
    generate(request_id="日" * 85 + "x"),
    generate(text="a" * 62),
    generate(text="\x00"),
    generate(token_ids={"ids": [VOCAB - 1] * 63}),
    stop(max_new_tokens=61, min_new_tokens=61),
    stop(strings=["日" * 341 + "x"] * 32, token_ids=[VOCAB - 1] * 1024),
    stop(ignore_eos=True, include_stop_in_text=True),
    generate(logprobs={"enabled": True, "top": 20, "prompt": True, "token_ids": [0] * 64}),
    generate(constraint={"choice": {"options": [f"{i}" for i in range(1024)]}}),
    chat(*[{"role": "u"}] * 8, tools_json=[]),
    chat({"role": "r" * 20, "content": "{{ 1 }}{% x %}\x00\u202e"}),
]


@pytest.mark.parametrize("request_", EDGES, ids=lambda given: str(given)[:40])
async def test_values_at_the_edge_are_served(stack: Stack, request_):
    message = generate_pb2.GenerateRequest()
    message.CopyFrom(request_)
    stack.engine.next_stream = play("x", n=message.n or 1)
    assert len((await stack.generate.Generate(message)).completions) == (message.n or 1)
    (job,) = stack.engine.generated
    # A float32 can hold what the kernel makes of them.
    assert job.sampling.repetition_penalty >= 1e-30
    assert all(abs(bias) < 3.403e38 for _, bias in job.sampling.logit_bias)
    assert max(bias for _, bias in job.sampling.logit_bias or [(0, 0)]) <= 3.4e38


MALFORMED = {
    "text that is no UTF-8": b"\x12\x02\xff\xfe",
    "a stop string that is no UTF-8": b"\x12\x02hi\x32\x04\x1a\x02\xff\xfe",
    "cut short": b"\x12\x50abc",
    "no message": b"\xff\xff\xff",
}


@pytest.mark.parametrize("raw", MALFORMED.values(), ids=MALFORMED)
@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
async def test_bytes_that_are_no_request(stack: Stack, method: str, raw: bytes):
    kind = stack.channel.unary_stream if method == "GenerateStream" else stack.channel.unary_unary
    failure = await failure_of(kind(f"/pyruntime.v1.GenerateService/{method}")(raw))
    assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
    assert stack.engine.generated == []


def test_every_name_that_the_renderer_reads_is_its_own():
    own = {
        name
        for function in (PreTrainedTokenizerFast.apply_chat_template, render_jinja_template)
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is not parameter.VAR_KEYWORD and name != "self"
    }
    assert own - {"conversations"} <= RESERVED_TEMPLATE_NAMES


async def test_an_answer_ends_as_soon_as_it_is_sure_to_be_too_large(stack: Stack):
    """Not when all of it has been computed: it would have to be held until then."""
    events = [[TokenEvent(0, 97, logprob=-1.0, top=((97, -1.0),) * 20)] * 10 for _ in range(100)]
    stream = FakeStream(events, hold=99)
    stack.engine.next_stream = stream
    failure = await failure_of(stack.generate.Generate(generate(logprobs={"enabled": True, "top": 20})))
    assert failure.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "more than 100000 bytes" in failure.message
    assert None in stream.cancelled


async def test_the_models_own_values_are_kept_within_what_float32_holds(stack: Stack):
    stack.decoder.generation_defaults = GenerationDefaults(repetition_penalty=1e-40)
    await stack.generate.Generate(generate())
    assert stack.engine.generated[0].sampling.repetition_penalty == 1e-30
