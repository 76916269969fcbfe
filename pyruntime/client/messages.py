"""Requests built from Python values and answers turned back; shared by both clients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from pyruntime.client.errors import ApiError
from pyruntime.v1 import common_pb2, embed_pb2, generate_pb2, model_pb2, score_pb2

Text: TypeAlias = str | Sequence[int]
"""A text, or its token ids."""

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
    return common_pb2.Input(token_ids=common_pb2.TokenIds(ids=value))


def generate_request(prompt: Text | Sequence[Mapping[str, str]], model: str, options: Mapping[str, Any]) -> Any:
    """``prompt``: a text, token ids, or messages of ``role`` and ``content``. Raises TypeError on an unknown option."""
    request = generate_pb2.GenerateRequest(model=model)
    if isinstance(prompt, str):
        request.text = prompt
    elif prompt and isinstance(prompt[0], Mapping):
        request.chat.messages.extend(generate_pb2.Chat.Message(**message) for message in prompt)  # type: ignore[arg-type]
    else:
        request.token_ids.ids.extend(prompt)  # type: ignore[arg-type]
    given = {name: value for name, value in options.items() if value is not None}
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
        model=model, inputs=[to_input(each) for each in inputs], encoding=embed_pb2.ENCODING_FLOAT32_LE, **given
    )


def embeddings(response: embed_pb2.EmbedResponse) -> np.ndarray:
    """float32 [N, D]. Raises the first input's ``ApiError`` if one failed."""
    rows = []
    for result in response.results:
        if result.WhichOneof("result") == "error":
            raise ApiError.from_status(result.error)
        rows.append(np.frombuffer(result.dense.packed, dtype="<f4"))
    return np.stack(rows).astype(np.float32, copy=False)


def score_request(
    query: Text, items: Iterable[Text], labels: Sequence[str] | Sequence[int], model: str, options: Mapping[str, Any]
) -> score_pb2.ScoreRequest:
    """``labels``: texts of one token each, or token ids."""
    given = {name: value for name, value in options.items() if value is not None}
    if isinstance(given.get("truncation"), str):
        given["truncation"] = common_pb2.Truncation.Value(f"truncation_{given['truncation']}".upper())
    request = score_pb2.ScoreRequest(model=model, query=to_input(query), items=[to_input(i) for i in items], **given)
    if all(isinstance(label, str) for label in labels):
        request.labels.extend(labels)  # type: ignore[arg-type]
    else:
        request.label_token_ids.extend(labels)  # type: ignore[arg-type]
    return request


def scores(response: score_pb2.ScoreResponse) -> np.ndarray:
    """float32 [items, labels]. Raises the first item's ``ApiError`` if one failed."""
    for result in response.results:
        if result.HasField("error"):
            raise ApiError.from_status(result.error)
    return np.array([result.scores for result in response.results], dtype=np.float32)


def tokenize_request(text: str, model: str, special_tokens: bool | None) -> model_pb2.TokenizeRequest:
    request = model_pb2.TokenizeRequest(model=model, text=text)
    if special_tokens is not None:
        request.special_tokens = special_tokens
    return request


def finish_name(reason: generate_pb2.FinishReason) -> str:
    """``STOP`` or ``LENGTH``."""
    return generate_pb2.FinishReason.Name(reason).removeprefix("FINISH_REASON_")
