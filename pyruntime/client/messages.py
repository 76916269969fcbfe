"""Requests built from Python values and answers turned back; shared by both clients."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np

from pyruntime.client.errors import ApiError
from pyruntime.v1 import common_pb2, embed_pb2, generate_pb2, model_pb2, score_pb2

Text: TypeAlias = str | Sequence[int] | np.ndarray
"""A text, or its token ids."""

T = TypeVar("T")

DEFAULT_TARGET = "127.0.0.1:50051"
DEFAULT_TIMEOUT_S = 300.0
# Answers are as large as the client asks for: no limit here beside the server's.
CHANNEL_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
_SAMPLING = frozenset(generate_pb2.Sampling.DESCRIPTOR.fields_by_name)
_STOP = {
    "max_new_tokens": "max_new_tokens",
    "min_new_tokens": "min_new_tokens",
    "stop": "strings",
    "stop_token_ids": "token_ids",
    "ignore_eos": "ignore_eos",
    "include_stop_in_text": "include_stop_in_text",
}


def to_input(value: Text) -> common_pb2.Input:
    if isinstance(value, str):
        return common_pb2.Input(text=value)
    return common_pb2.Input(token_ids=common_pb2.TokenIds(ids=to_ids(value, "an input that is no text")))


def to_ids(value: Any, what: str) -> list[int]:
    """Token ids from any iterable of integers, numpy's included. TypeError, which names ``what``, for anything else."""
    try:
        return [operator.index(each) for each in value]
    except TypeError as error:
        raise TypeError(f"{what} must be a list of token ids, not {_shown(value)}") from error


def several(values: Iterable[T], what: str) -> list[T]:
    """The entries of a list. A text is one by accident, letter by letter: TypeError, which names ``what``."""
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise TypeError(f"{what} must be a list, not {_shown(values)}; for a single one write [...] around it")
    return list(values)


def _shown(value: object) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 40 else text[:37] + '...'}"


def generate_request(prompt: Text | Sequence[Mapping[str, str]], model: str, options: Mapping[str, Any]) -> Any:
    """``prompt``: a text, token ids, or messages of ``role`` and ``content``. Raises TypeError on an unknown option."""
    request = generate_pb2.GenerateRequest(model=model)
    if isinstance(prompt, str):
        request.text = prompt
    elif len(prompt) and isinstance(prompt[0], Mapping):
        request.chat.messages.extend(generate_pb2.Chat.Message(**message) for message in prompt)  # type: ignore[arg-type]
    else:
        request.token_ids.ids.extend(to_ids(prompt, "a prompt that is neither text nor messages"))
    given = {name: value for name, value in options.items() if value is not None}
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    if "stop_token_ids" in given:
        given["stop_token_ids"] = to_ids(given["stop_token_ids"], "stop_token_ids")
    if "logprobs" in given:
        request.logprobs.enabled, request.logprobs.top = True, given.pop("logprobs")
    request.sampling.MergeFrom(generate_pb2.Sampling(**{k: v for k, v in given.items() if k in _SAMPLING}))
    request.stop.MergeFrom(generate_pb2.Stop(**{_STOP[k]: v for k, v in given.items() if k in _STOP}))
    for name in given.keys() - _SAMPLING - _STOP.keys():
        if name not in ("n", "priority", "request_id"):
            raise TypeError(f"unknown option {name!r}")
        setattr(request, name, given[name])
    return request


def embed_request(inputs: Iterable[Text], model: str, options: Mapping[str, Any]) -> embed_pb2.EmbedRequest:
    """Vectors travel as little-endian float32, which numpy reads without a copy a number."""
    given = {name: value for name, value in options.items() if value is not None}
    for name, kind in (("pooling", embed_pb2.Pooling), ("truncation", common_pb2.Truncation)):
        if isinstance(given.get(name), str):
            given[name] = kind.Value(f"{name}_{given[name]}".upper())
    return embed_pb2.EmbedRequest(
        model=model,
        inputs=[to_input(each) for each in several(inputs, "inputs")],
        encoding=embed_pb2.ENCODING_FLOAT32_LE,
        **given,
    )


def each_embedding(response: embed_pb2.EmbedResponse) -> list[np.ndarray | ApiError]:
    """float32 [D] of each input, or what is wrong with it."""
    return [
        ApiError.from_status(result.error)
        if result.WhichOneof("result") == "error"
        else np.frombuffer(result.dense.packed, dtype="<f4").astype(np.float32, copy=False)
        for result in response.results
    ]


def each_score(response: score_pb2.ScoreResponse) -> list[np.ndarray | ApiError]:
    """float32 [labels] of each item, or what is wrong with it."""
    return [
        ApiError.from_status(result.error) if result.HasField("error") else np.array(result.scores, np.float32)
        for result in response.results
    ]


def stacked(results: list[np.ndarray | ApiError]) -> np.ndarray:
    """float32 [N, ...]. Raises the first ``ApiError`` if there is one."""
    rows = []
    for result in results:
        if isinstance(result, ApiError):
            raise result
        rows.append(result)
    return np.stack(rows)


def score_request(
    query: Text,
    items: Iterable[Text],
    labels: Sequence[str] | Sequence[int] | np.ndarray,
    model: str,
    options: Mapping[str, Any],
) -> score_pb2.ScoreRequest:
    """``labels``: texts of one token each, or token ids."""
    given = {name: value for name, value in options.items() if value is not None}
    if isinstance(given.get("truncation"), str):
        given["truncation"] = common_pb2.Truncation.Value(f"truncation_{given['truncation']}".upper())
    inputs = [to_input(item) for item in several(items, "items")]
    request = score_pb2.ScoreRequest(model=model, query=to_input(query), items=inputs, **given)
    names: list[Any] = several(labels, "labels")
    if all(isinstance(label, str) for label in names):
        request.labels.extend(names)
    else:
        request.label_token_ids.extend(to_ids(names, "labels that are not all texts"))
    return request


def detokenize_request(token_ids: Sequence[int] | np.ndarray, model: str) -> model_pb2.DetokenizeRequest:
    return model_pb2.DetokenizeRequest(model=model, token_ids=to_ids(token_ids, "token_ids"))


def tokenize_request(text: str, model: str, special_tokens: bool | None) -> model_pb2.TokenizeRequest:
    request = model_pb2.TokenizeRequest(model=model, text=text)
    if special_tokens is not None:
        request.special_tokens = special_tokens
    return request


def finish_name(reason: generate_pb2.FinishReason) -> str:
    """``STOP`` or ``LENGTH``."""
    return generate_pb2.FinishReason.Name(reason).removeprefix("FINISH_REASON_")
