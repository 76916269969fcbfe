"""Requests built from Python values and answers turned back; shared by both clients."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard, TypeVar

import numpy as np

from pyruntime.client.errors import ApiError
from pyruntime.client.fields import as_json, fill, located, shown
from pyruntime.types import SparseVector
from pyruntime.v1 import common_pb2, embed_pb2, generate_pb2, model_pb2, score_pb2

Text: TypeAlias = str | Sequence[int] | np.ndarray
"""A text, or its token ids."""

Prompt: TypeAlias = Text | Sequence[Mapping[str, Any]]
"""What is continued: a text, token ids, or messages of a chat."""

Embedding: TypeAlias = np.ndarray | SparseVector
"""Of one input: float32 [D], a ``SparseVector``, or float32 [L, D] for vectors of tokens."""

T = TypeVar("T")

DEFAULT_TARGET = "127.0.0.1:50051"
DEFAULT_TIMEOUT_S = 300.0
CHAT_OPTIONS = frozenset(
    {"tools", "continue_final_message", "add_generation_prompt", "template_arguments", "allow_control_tokens"}
)
_SAMPLING = frozenset(generate_pb2.Sampling.DESCRIPTOR.fields_by_name)
_CONSTRAINTS = frozenset(generate_pb2.Constraint.DESCRIPTOR.fields_by_name)
_STOP = {
    "max_new_tokens": "max_new_tokens",
    "min_new_tokens": "min_new_tokens",
    "stop": "strings",
    "stop_token_ids": "token_ids",
    "ignore_eos": "ignore_eos",
    "include_stop_in_text": "include_stop_in_text",
}


def to_input(value: Text, what: str = "an input") -> common_pb2.Input:
    """``what``: names it in errors."""
    if not isinstance(value, str):
        return common_pb2.Input(token_ids=common_pb2.TokenIds(ids=to_ids(value, f"{what} that is no text")))
    try:
        return common_pb2.Input(text=value)
    except UnicodeEncodeError as error:
        raise located(error, what) from None


def to_inputs(values: Iterable[Text], what: str) -> list[common_pb2.Input]:
    """Each of a list, named by its place in errors."""
    return [to_input(value, f"{what}[{place}]") for place, value in enumerate(several(values, what))]


def to_ids(value: Any, what: str) -> list[int]:
    """Token ids from any iterable of integers, numpy's included. TypeError, which names ``what``, for anything else;
    ValueError for what cannot be one.
    """
    ids: list[int] | None = None
    if not isinstance(value, (str, bytes, bytearray, Mapping)):  # iterables of numbers, though hardly of token ids
        with contextlib.suppress(TypeError):
            ids = [operator.index(each) for each in value]
    if ids is None:
        raise TypeError(f"{what} must be a list of token ids, not {shown(value)}")
    if ids and (min(ids) < 0 or max(ids) >= 2**32):
        place, bad = next((place, each) for place, each in enumerate(ids) if not 0 <= each < 2**32)
        raise ValueError(f"{what}, entry {place}: {bad} is out of range; allowed: ids of the model's vocabulary")
    return ids


def several(values: Iterable[T], what: str) -> list[T]:
    """The entries of a list. A text is one by accident, letter by letter: TypeError, which names ``what``."""
    check_is_list(values, what)
    return list(values)


def check_is_list(values: object, what: str) -> None:
    """TypeError, which names ``what``, unless several values can be taken from it."""
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise TypeError(f"{what} must be a list, not {shown(values)}; for a single one write [...] around it")


def is_chat(prompt: Any) -> TypeGuard[Sequence[Mapping[str, Any]]]:
    """Whether a prompt is a list of messages."""
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def chat_message(messages: Iterable[Mapping[str, Any]], options: Mapping[str, Any]) -> generate_pb2.Chat:
    """Messages of ``role``, ``content`` and what else the template reads; of ``options``, those in ``CHAT_OPTIONS``."""
    chat = generate_pb2.Chat()
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise TypeError(f"messages[{place}] must be a mapping with role and content, not {shown(message)}")
        further = {name: value for name, value in message.items() if name not in ("role", "content")}
        made = chat.messages.add(fields_json=as_json(further, f"messages[{place}]") if further else "")
        # An assistant that only calls tools says nothing, or None.
        for name in ("role", "content"):
            fill(made, {name: message.get(name)}, f"messages[{place}].{name}")
    given = {name: options[name] for name in CHAT_OPTIONS if options.get(name) is not None}
    for place, tool in enumerate(several(given.pop("tools", ()), "tools")):
        chat.tools_json.append(tool if isinstance(tool, str) else as_json(tool, f"tools[{place}]"))
    fill(chat, given)
    return chat


def generate_request(prompt: Text | Sequence[Mapping[str, Any]], model: str, options: Mapping[str, Any]) -> Any:
    """``prompt``: a text, token ids, or messages, see ``chat_message``. Raises TypeError on an unknown option."""
    request = generate_pb2.GenerateRequest()
    fill(request, {"model": model})
    if isinstance(prompt, str):
        fill(request, {"text": prompt}, "prompt")
    elif is_chat(prompt):
        request.chat.CopyFrom(chat_message(prompt, options))
    else:
        request.token_ids.ids.extend(to_ids(prompt, "a prompt that is neither text nor messages"))
    for name in CHAT_OPTIONS & options.keys():
        if options[name] is not None and not request.HasField("chat"):
            raise TypeError(f"{name} is for messages; the prompt is none")
    given = {name: value for name, value in options.items() if value is not None and name not in CHAT_OPTIONS}
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    if "stop_token_ids" in given:
        given["stop_token_ids"] = to_ids(given["stop_token_ids"], "stop_token_ids")
    if "logprobs" in given:
        request.logprobs.enabled = True
        fill(request.logprobs, {"top": given.pop("logprobs")}, "logprobs")
    if given.get("prompt_logprobs"):
        request.logprobs.enabled = True
    fill(request.logprobs, {"prompt": given.pop("prompt_logprobs", None) or None}, "prompt_logprobs")
    if "logprob_token_ids" in given:
        request.logprobs.enabled = True
        request.logprobs.token_ids.extend(to_ids(given.pop("logprob_token_ids"), "logprob_token_ids"))
    _add_constraint(request, given)
    for name, value in given.items():
        if name in _SAMPLING:
            fill(request.sampling, {name: value})
        elif name in _STOP:
            fill(request.stop, {_STOP[name]: value}, name)
        elif name in ("n", "priority", "request_id", "chunk_tokens"):
            fill(request, {name: value})
        else:
            raise TypeError(f"unknown option {name!r}")
    return request


def _add_constraint(request: generate_pb2.GenerateRequest, given: dict[str, Any]) -> None:
    """Takes its option out of ``given``. TypeError for more than one."""
    kinds = sorted(_CONSTRAINTS & given.keys())
    if len(kinds) > 1:
        raise TypeError(f"one of {', '.join(kinds)} at a time")
    for kind in kinds:
        value = given.pop(kind)
        if kind == "choice":
            if isinstance(value, str):
                raise TypeError("choice is a list of texts, not one text")
            fill(request.constraint.choice, {"options": value}, kind)
        else:
            is_object = kind == "json_schema" and not isinstance(value, str)
            fill(request.constraint, {kind: as_json(value, kind) if is_object else value})


def embed_request(inputs: Iterable[Text], model: str, options: Mapping[str, Any]) -> embed_pb2.EmbedRequest:
    """Vectors travel as little-endian float32, which numpy reads without a copy a number."""
    request = embed_pb2.EmbedRequest(inputs=to_inputs(inputs, "inputs"))
    fill(request, {"model": model, **options})
    if request.kind != embed_pb2.EMBEDDING_KIND_SPARSE:
        request.encoding = embed_pb2.ENCODING_FLOAT32_LE
    return request


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
    return np.frombuffer(packed, dtype="<f4").astype(np.float32)  # a copy: what lies in the message is read-only


def embeddings(response: embed_pb2.EmbedResponse) -> Any:
    """What ``embed`` returns: float32 [N, D], or a list for the other kinds. Raises the first input's error."""
    results: list[Any] = good(each_embedding(response))
    return np.stack(results) if response.results[0].HasField("dense") else results


def together(results: list[Any]) -> Any:
    """float32 [N, D] of dense vectors; a list of anything else, and of nothing: how long it would be is not known."""
    return np.stack(results) if results and getattr(results[0], "ndim", 0) == 1 else results


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
    request = score_pb2.ScoreRequest(query=to_input(query, "query"), items=to_inputs(items, "items"))
    fill(request, {"model": model, **options})
    names: list[Any] = several(labels, "labels")
    if all(isinstance(label, str) for label in names):
        request.labels.extend(names)
    else:
        request.label_token_ids.extend(to_ids(names, "labels that are not all texts"))
    return request


def detokenize_request(token_ids: Sequence[int] | np.ndarray, model: str) -> model_pb2.DetokenizeRequest:
    return model_pb2.DetokenizeRequest(model=model, token_ids=to_ids(token_ids, "token_ids"))


def tokenize_request(
    text: str | Sequence[Mapping[str, Any]], model: str, special_tokens: bool | None, options: Mapping[str, Any]
) -> model_pb2.TokenizeRequest:
    """``text``: a text, or messages with ``CHAT_OPTIONS``. Raises TypeError on an unknown option."""
    for name in options:
        if name not in CHAT_OPTIONS or isinstance(text, str):
            raise TypeError(f"unknown option {name!r}; for messages: {', '.join(sorted(CHAT_OPTIONS))}")
    request = model_pb2.TokenizeRequest()
    fill(request, {"model": model, "special_tokens": special_tokens})
    if isinstance(text, str):
        fill(request, {"text": text})
    else:
        check_is_list(text, "what is no text")
        request.chat.CopyFrom(chat_message(text, options))
    return request


def finish_name(reason: generate_pb2.FinishReason) -> str:
    """``STOP`` or ``LENGTH``."""
    return generate_pb2.FinishReason.Name(reason).removeprefix("FINISH_REASON_")
