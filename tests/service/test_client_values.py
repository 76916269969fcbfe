"""Values that a request cannot hold: errors that name field, value and range, before anything is sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pyruntime.client import AsyncClient, Client, Retry, connection, messages, ranking, retry

CHAT = [{"role": "user", "content": "hi"}]


def generate(prompt: Any = "hi", **options: Any) -> Any:
    return messages.generate_request(prompt, "m", options)


def embed(inputs: Any = ("a",), **options: Any) -> Any:
    return messages.embed_request(inputs, "m", options)


@pytest.mark.parametrize(
    ("build", "kind", "says"),
    [
        (lambda: generate(temperature="hot"), TypeError, "temperature: str 'hot' is not allowed; allowed: numbers"),
        (lambda: generate(max_new_tokens=1.5), TypeError, "max_new_tokens: float 1.5 is not allowed"),
        (lambda: generate(max_new_tokens=-1), ValueError, "max_new_tokens: int -1 is not allowed; allowed: whole"),
        (lambda: generate(seed=2**64), ValueError, "of 0 to 18446744073709551615"),
        (lambda: generate(ignore_eos="yes"), TypeError, "ignore_eos: str 'yes' is not allowed; allowed: True and"),
        (lambda: generate(stop=5), TypeError, "stop: int 5 is not allowed; allowed: a list of texts"),
        (lambda: generate(stop_token_ids=[3, -1]), ValueError, "stop_token_ids, entry 1: -1 is out of range"),
        (lambda: generate(logit_bias={"a": 1}), TypeError, "logit_bias: dict {'a': 1} is not allowed"),
        (lambda: generate(logprobs=-1), ValueError, "logprobs: int -1 is not allowed"),
        (lambda: generate(prompt_logprobs="x"), TypeError, "prompt_logprobs: str 'x' is not allowed"),
        (lambda: generate(request_id=5), TypeError, "request_id: int 5 is not allowed; allowed: texts"),
        (lambda: generate(regex=5), TypeError, "regex: int 5 is not allowed"),
        (lambda: generate(choice=[1]), TypeError, "choice: list [1] is not allowed; allowed: a list of texts"),
        (lambda: generate(json_schema={"a": {1}}), TypeError, "json_schema: dict {'a': {1}} cannot be written as JSON"),
        (lambda: generate(None), TypeError, "must be a list of token ids, not NoneType None"),
        (lambda: generate(5), TypeError, "must be a list of token ids, not int 5"),
        (lambda: generate(CHAT[0]), TypeError, "must be a list of token ids, not dict"),
        (lambda: generate([2**33]), ValueError, "entry 0: 8589934592 is out of range"),
        (lambda: generate([*CHAT, "b"]), TypeError, "messages[1] must be a mapping with role and content"),
        (lambda: generate([{"role": 5}]), TypeError, "messages[0].role: int 5 is not allowed"),
        (lambda: generate(CHAT, template_arguments=5), TypeError, "template_arguments: int 5 is not allowed"),
        (lambda: generate(CHAT, tools=[object()]), TypeError, "tools[0]: object"),
        (lambda: generate("a\udc80"), UnicodeEncodeError, "surrogates not allowed, in prompt"),
        (lambda: embed(["a", "\udc80"]), UnicodeEncodeError, "surrogates not allowed, in inputs[1]"),
        (lambda: embed(["a", None]), TypeError, "inputs[1] that is no text must be a list of token ids"),
        (lambda: embed(kind="wide"), ValueError, "kind: str 'wide' is not allowed; allowed: 'dense', 'sparse', 'per"),
        (lambda: embed(pooling="max"), ValueError, "pooling: str 'max' is not allowed; allowed: 'last', 'cls', 'mean'"),
        (lambda: embed(poolin="cls"), TypeError, "unknown option 'poolin'"),
        (lambda: messages.score_request(None, ["a"], ["y"], "m", {}), TypeError, "query that is no text"),
        (lambda: messages.score_request("q", ["a"], ["y"], 5, {}), TypeError, "model: int 5 is not allowed"),
        (lambda: ranking.rerank_request("q", [5], "m", {}), TypeError, "documents: list [5] is not allowed"),
        (lambda: ranking.classify_request([("a", None)], "m", {}), TypeError, "pairs[0].second that is no text"),
        (lambda: messages.tokenize_request(["a"], "m", None, {}), TypeError, "messages[0] must be a mapping"),
        (lambda: messages.tokenize_request(5, "m", None, {}), TypeError, "must be a list, not int 5"),
    ],
)
def test_a_value_that_the_field_cannot_hold(build, kind, says: str):
    with pytest.raises(kind) as caught:
        build()
    assert says in str(caught.value)


def test_what_numpy_has_is_taken():
    made = generate(max_new_tokens=np.int64(2), temperature=np.float32(0.5), ignore_eos=np.bool_(True))
    assert (made.stop.max_new_tokens, made.sampling.temperature, made.stop.ignore_eos) == (2, 0.5, True)
    assert dict(generate(logit_bias={np.int64(5): np.float32(1)}).sampling.logit_bias) == {5: 1.0}
    assert [each.text for each in embed(np.array(["a", "b"])).inputs] == ["a", "b"]
    assert generate(temperature=None).sampling.HasField("temperature") is False


def test_times():
    assert retry.checked_timeout(-1) == -1  # a deadline of the caller's that has passed
    # gRPC would take these for one that has passed.
    assert retry.checked_timeout(float("inf")) == retry.checked_timeout(1e12) == 1e8
    for value, kind in (("5", TypeError), (True, TypeError), (float("nan"), ValueError)):
        with pytest.raises(kind, match="timeout_s must be a number of seconds"):
            retry.checked_timeout(value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"target": 5}, "target must be a text as HOST:PORT, not int 5"),
        ({"timeout_s": "x"}, "timeout_s must be a number of seconds, not str 'x'"),
        ({"retry": 5}, "retry must be a Retry, not int 5"),
    ],
)
@pytest.mark.parametrize("kind", [Client, AsyncClient])
async def test_a_client_is_not_made_of_what_it_cannot_use(kind, given: Any, says: str):
    with pytest.raises(TypeError, match=says):
        kind(**given)


def test_times_of_retries():
    with pytest.raises(TypeError, match="attempts of Retry must be a number, not str 'x'"):
        Retry(attempts="x")  # type: ignore[arg-type]


def test_metadata_is_checked_before_grpc_quotes_all_of_it():
    assert connection.checked_entries({"x-a": "b"}) == connection.checked_entries([("x-a", "b")]) == [("x-a", "b")]
    assert connection.checked_entries([("x-a-bin", b"\xff")]) == [("x-a-bin", b"\xff")]  # type: ignore[list-item]
    for bad in ([("X-A", "b")], [("x-a", "é")], [("x-a", 5)], [("x-a", "b\n")], ["x-a"]):
        with pytest.raises((TypeError, ValueError), match="metadata"):
            connection.checked_entries(bad)  # type: ignore[arg-type]
    for token in (5, b"token", lambda: None):
        with pytest.raises(TypeError, match="a token must be a text"):
            connection.bearer(token)  # type: ignore[arg-type]


@pytest.mark.parametrize(("size", "kind"), [("x", TypeError), (1.5, TypeError), (0, ValueError)])
def test_a_size_that_is_none(size: Any, kind):
    with Client("127.0.0.1:1") as client, pytest.raises(kind, match="batch_size must be"):
        client.embed_many(["a"], batch_size=size)
