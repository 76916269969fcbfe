"""Requests built from Python values and answers turned back; shared by both clients."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np

from pyruntime.client.errors import ApiError
from pyruntime.types import SparseVector
from pyruntime.v1 import common_pb2, embed_pb2, generate_pb2, model_pb2, score_pb2

Text: TypeAlias = str | Sequence[int] | np.ndarray
"""A text, or its token ids."""

Embedding: TypeAlias = np.ndarray | SparseVector
"""Of one input: float32 [D], a ``SparseVector``, or float32 [L, D] for vectors of tokens."""

T = TypeVar("T")

DEFAULT_TARGET = "127.0.0.1:50051"
DEFAULT_TIMEOUT_S = 300.0
CHANNEL_OPTIONS = [
    # Answers are as large as the client asks for: no limit here beside the server's.
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # A stream has no deadline: this finds out when the server's machine is gone.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.http2.max_pings_without_data", 0),
]
_EMBED_ENUMS: dict[str, tuple[str, Any]] = {
    "kind": ("embedding_kind", embed_pb2.EmbeddingKind),
    "pooling": ("pooling", embed_pb2.Pooling),
    "truncation": ("truncation", common_pb2.Truncation),
}
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
    check_is_list(values, what)
    return list(values)


def check_is_list(values: object, what: str) -> None:
    """TypeError, which names ``what``, unless several values can be taken from it."""
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise TypeError(f"{what} must be a list, not {_shown(values)}; for a single one write [...] around it")


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
    for name, (prefix, kind) in _EMBED_ENUMS.items():
        if isinstance(given.get(name), str):
            given[name] = kind.Value(f"{prefix}_{given[name]}".upper())
    if given.get("kind") != embed_pb2.EMBEDDING_KIND_SPARSE:
        given["encoding"] = embed_pb2.ENCODING_FLOAT32_LE
    return embed_pb2.EmbedRequest(model=model, inputs=[to_input(each) for each in several(inputs, "inputs")], **given)


def each_embedding(response: embed_pb2.EmbedResponse) -> list[Embedding | ApiError]:
    """Each input's embedding, or what is wrong with it."""
    return [_embedding(result) for result in response.results]


def _embedding(result: embed_pb2.EmbedResult) -> Embedding | ApiError:
    which = result.WhichOneof("result")
    if which == "error":
        return ApiError.from_status(result.error)
    if which == "sparse":
        ids, weights = np.array(result.sparse.token_ids, np.int64), np.array(result.sparse.weights, np.float32)
        return SparseVector(ids, weights)
    if which == "tokens":
        vectors = result.tokens.vectors
        return _numbers(b"".join(each.packed for each in vectors)).reshape(len(vectors), -1 if vectors else 0)
    return _numbers(result.dense.packed)


def _numbers(packed: bytes) -> np.ndarray:
    return np.frombuffer(packed, dtype="<f4").astype(np.float32, copy=False)


def embeddings(response: embed_pb2.EmbedResponse, kind: str) -> Any:
    """What ``embed`` returns: float32 [N, D], or a list for the other kinds. Raises the first input's error."""
    results: list[Any] = good(each_embedding(response))
    return np.stack(results) if kind == "dense" else results


def each_score(response: score_pb2.ScoreResponse) -> list[np.ndarray | ApiError]:
    """float32 [labels] of each item, or what is wrong with it."""
    return [
        ApiError.from_status(result.error) if result.HasField("error") else np.array(result.scores, np.float32)
        for result in response.results
    ]


def good(results: Sequence[T | ApiError]) -> list[T]:
    """The results. Raises the first ``ApiError`` if there is one."""
    found: list[T] = []
    for result in results:
        if isinstance(result, ApiError):
            raise result
        found.append(result)
    return found


def stacked(results: Sequence[np.ndarray | ApiError]) -> np.ndarray:
    """float32 [N, ...]. Raises the first ``ApiError`` if there is one."""
    return np.stack(good(results))


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
