"""A ScoreRequest's query, items and labels as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pyruntime.errors import InvalidField
from pyruntime.registry import ServedModel
from pyruntime.service.inputs import encode_inputs, given_ids, known_ids
from pyruntime.service.validate import check_text, check_token_ids, show
from pyruntime.v1 import common_pb2, score_pb2


@dataclass
class ScoreInputs:
    """``prefix`` stands before each of ``items``; an item may be what is wrong with it instead."""

    prefix: list[int]
    items: list[list[int] | InvalidField]


def leading_special_ids(model: ServedModel) -> list[int]:
    """What the tokenizer puts before a text: the beginning-of-sequence token, where the model has one."""
    bare = model.tokenizer.encode("a", special_tokens=False)
    whole = model.tokenizer.encode("a")
    places = (place for place in range(len(whole)) if whole[place : place + len(bare)] == bare)
    return whole[: next(places, 0)]


def read_score_inputs(model: ServedModel, request: score_pb2.ScoreRequest, max_text_bytes: int) -> ScoreInputs:
    """Query and items, with the special tokens of a text's start before whichever comes first, if that is text.

    Items too long for what the query leaves of the context are cut or refused, as ``request.truncation`` says.
    """
    if request.HasField("delimiter_token_id"):
        query, items = _split_packed(model, request)
        return ScoreInputs(query, _fit(items, _room(model, query), request.truncation))
    start = leading_special_ids(model)
    query = _encode_query(model, request.query, max_text_bytes)
    items = encode_inputs(model, request.items, "items", max_text_bytes, special_tokens=False)
    if not request.item_first:
        prefix = (start if request.query.HasField("text") else []) + query
        return ScoreInputs(prefix, _fit(items, _room(model, prefix), request.truncation))
    starts = [start if item.HasField("text") else [] for item in request.items]
    cut = _fit(items, _room(model, start + query), request.truncation)
    return ScoreInputs([], [_join(head, item, query) for head, item in zip(starts, cut, strict=True)])


def read_label_ids(model: ServedModel, request: score_pb2.ScoreRequest) -> list[int]:
    """The labels' ids, in the order of the request. ``InvalidField`` for a text that is not exactly one token."""
    if request.label_token_ids:
        return check_token_ids("label_token_ids", request.label_token_ids, model.info.vocab_size)
    encoded = model.tokenizer.encode_batch(list(request.labels), special_tokens=False)
    for place, (label, ids) in enumerate(zip(request.labels, encoded, strict=True)):
        if len(ids) != 1:
            raise InvalidField(f"labels[{place}]", f"{show(label)} is {len(ids)} tokens; allowed: exactly one")
        known_ids(model, ids, f"labels[{place}]")
    return [ids[0] for ids in encoded]


def _encode_query(model: ServedModel, query: common_pb2.Input, max_text_bytes: int) -> list[int]:
    if query.WhichOneof("value") != "text":
        return given_ids(model, query, "query")
    check_text("query.text", query.text, max_text_bytes)
    ids = known_ids(model, model.tokenizer.encode(query.text, special_tokens=False), "query.text")
    if not ids:
        raise InvalidField("query.text", "has no tokens")
    return ids


def _split_packed(
    model: ServedModel, request: score_pb2.ScoreRequest
) -> tuple[list[int], list[list[int] | InvalidField]]:
    """Query d item1 d item2 d ... itemn d, d being the delimiter, taken apart."""
    delimiter = request.delimiter_token_id
    field = "query.token_ids"
    if delimiter >= model.info.vocab_size:
        problem = f"{delimiter} is outside the vocabulary; allowed: 0 to {model.info.vocab_size - 1}"
        raise InvalidField("delimiter_token_id", problem)
    ids = given_ids(model, request.query, "query")
    if ids[-1] != delimiter:
        raise InvalidField(field, f"ends in {ids[-1]}; allowed: the delimiter {delimiter} at the end")
    parts: list[list[int]] = [[]]
    for token_id in ids[:-1]:
        if token_id == delimiter:
            parts.append([])
        else:
            parts[-1].append(token_id)
    query, items = parts[0], parts[1:]
    if not query:
        raise InvalidField(field, "begins with the delimiter; allowed: a query before it")
    if not items:
        raise InvalidField(field, "holds one delimiter; allowed: one after the query and one after each item")
    return query, [item or InvalidField(field, f"item {index} is empty") for index, item in enumerate(items)]


def _room(model: ServedModel, before: Sequence[int]) -> int:
    """Tokens that remain for an item beside the query."""
    longest = model.info.context_length
    if len(before) >= longest:
        problem = f"has {len(before)} tokens; allowed: at most {longest - 1}, so that an item has room"
        raise InvalidField("query", problem)
    return longest - len(before)


def _fit(
    items: list[list[int] | InvalidField], room: int, truncation: common_pb2.Truncation
) -> list[list[int] | InvalidField]:
    return [_fit_one(item, index, room, truncation) for index, item in enumerate(items)]


def _fit_one(
    item: list[int] | InvalidField, index: int, room: int, truncation: common_pb2.Truncation
) -> list[int] | InvalidField:
    if isinstance(item, InvalidField) or len(item) <= room:
        return item
    if truncation == common_pb2.TRUNCATION_RIGHT:
        return item[:room]
    if truncation == common_pb2.TRUNCATION_LEFT:
        return item[-room:]
    problem = f"has {len(item)} tokens; allowed: at most {room} beside the query unless truncation is set"
    return InvalidField(f"items[{index}]", problem)


def _join(start: list[int], item: list[int] | InvalidField, query: list[int]) -> list[int] | InvalidField:
    return item if isinstance(item, InvalidField) else start + item + query
