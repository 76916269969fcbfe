"""A ScoreRequest's query, items and labels as token ids."""

from __future__ import annotations

from dataclasses import dataclass

from pyruntime.errors import InvalidField
from pyruntime.registry import ServedModel
from pyruntime.service.inputs import InputLimits, Reading, given_ids, known_ids, read_inputs, size_of
from pyruntime.service.score_heads import check_total_tokens
from pyruntime.service.validate import check_text, check_token_ids, show, text_bytes
from pyruntime.service.workers import TextWorkers, slices
from pyruntime.v1 import common_pb2, score_pb2


@dataclass
class ScoreInputs:
    """``prefix`` stands before each of ``items``; an item may be what is wrong with it instead."""

    prefix: list[int]
    items: list[list[int] | InvalidField]


async def read_score_inputs(
    workers: TextWorkers, model: ServedModel, request: score_pb2.ScoreRequest, limits: InputLimits
) -> ScoreInputs:
    """Query and items, with the special tokens of a text's start before whichever comes first, if that is text.

    Items too long for what the query leaves of the context are cut or refused, as ``request.truncation`` says.
    """
    query = await workers.run(size_of(request.query), _encode_query, model, request.query, limits)
    items = await read_inputs(workers, model, request.items, Reading("items", limits, special_tokens=False))
    arrange = _items_first if request.item_first else _query_first
    num_ids = sum(len(query) + len(item) for item in items if not isinstance(item, InvalidField))
    return await workers.run(num_ids, arrange, model, request, query, items)


def _query_first(
    model: ServedModel, request: score_pb2.ScoreRequest, query: list[int], items: list[list[int] | InvalidField]
) -> ScoreInputs:
    prefix = (model.tokenizer.leading_special_ids if request.query.HasField("text") else []) + query
    room = _room(model, len(prefix), "query")
    return ScoreInputs(prefix, [_fit(item, i, room, request.truncation) for i, item in enumerate(items)])


def _items_first(
    model: ServedModel, request: score_pb2.ScoreRequest, query: list[int], items: list[list[int] | InvalidField]
) -> ScoreInputs:
    special = model.tokenizer.leading_special_ids
    starts = [special if item.HasField("text") else [] for item in request.items]
    room = _room(model, len(query) + min(map(len, starts)), "query") + min(map(len, starts))
    fitted = [
        _fit(item, index, room - len(start), request.truncation)
        for index, (start, item) in enumerate(zip(starts, items, strict=True))
    ]
    check_total_tokens("items", fitted, num_each=len(query))  # before the query is copied behind each
    joined = [
        each if isinstance(each, InvalidField) else start + each + query
        for start, each in zip(starts, fitted, strict=True)
    ]
    return ScoreInputs([], joined)


def count_packed(request: score_pb2.ScoreRequest) -> int:
    """How many items the packed form holds; less than 1 where it is malformed."""
    return list(request.query.token_ids.ids).count(request.delimiter_token_id) - 1


def read_packed_inputs(model: ServedModel, request: score_pb2.ScoreRequest, limits: InputLimits) -> ScoreInputs:
    """As ``read_score_inputs``, for the form whose query holds the items too: nothing is tokenised."""
    query, items = _split_packed(model, request, limits)
    room = _room(model, len(query), "query.token_ids")
    fitted = [_fit(item, index, room, request.truncation, "query.token_ids") for index, item in enumerate(items)]
    return ScoreInputs(query, fitted)


async def read_label_ids(
    workers: TextWorkers, model: ServedModel, request: score_pb2.ScoreRequest, limits: InputLimits
) -> list[int]:
    """The labels' ids, in the order of the request. ``InvalidField`` for a text that is not exactly one token."""
    if request.label_token_ids:
        given = request.label_token_ids
        return check_token_ids("label_token_ids", given, model.info.vocab_size, len(given))
    sizes = [text_bytes(label) for label in request.labels]
    label_ids: list[int] = []
    for places in slices(sizes):
        label_ids += await workers.run(sum(sizes[i] for i in places), _encode_labels, model, request, places, limits)
    return label_ids


def _encode_labels(
    model: ServedModel, request: score_pb2.ScoreRequest, places: range, limits: InputLimits
) -> list[int]:
    labels = [request.labels[place] for place in places]
    for place, label in zip(places, labels, strict=True):
        check_text(f"labels[{place}]", label, limits.max_text_bytes, may_be_blank=True)
    encoded = model.tokenizer.encode_batch(labels, special_tokens=False)
    for place, label, ids in zip(places, labels, encoded, strict=True):
        if len(ids) != 1:
            raise InvalidField(f"labels[{place}]", f"{show(label)} is {len(ids)} tokens; allowed: exactly one")
        known_ids(model, ids, f"labels[{place}]")
    return [ids[0] for ids in encoded]


def _encode_query(model: ServedModel, query: common_pb2.Input, limits: InputLimits) -> list[int]:
    if query.WhichOneof("value") != "text":
        return given_ids(model, query, "query", limits)
    check_text("query.text", query.text, limits.max_text_bytes)
    ids = known_ids(model, model.tokenizer.encode(query.text, special_tokens=False), "query.text")
    if not ids:
        raise InvalidField("query.text", "has no tokens")
    return ids


def _split_packed(
    model: ServedModel, request: score_pb2.ScoreRequest, limits: InputLimits
) -> tuple[list[int], list[list[int] | InvalidField]]:
    """Query d item1 d item2 d ... itemn d, d being the delimiter, taken apart."""
    delimiter = request.delimiter_token_id
    field = "query.token_ids"
    if delimiter >= model.info.vocab_size:
        problem = f"{delimiter} is outside the vocabulary; allowed: 0 to {model.info.vocab_size - 1}"
        raise InvalidField("delimiter_token_id", problem)
    ids = given_ids(model, request.query, "query", limits)
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


def _room(model: ServedModel, num_before: int, field: str) -> int:
    """Tokens that remain for an item beside the query."""
    longest = model.info.context_length
    if num_before >= longest:
        problem = f"has {num_before} tokens; allowed: at most {longest - 1}, so that an item has room"
        raise InvalidField(field, problem)
    return longest - num_before


def _fit(
    item: list[int] | InvalidField, index: int, room: int, truncation: common_pb2.Truncation, packed_in: str = ""
) -> list[int] | InvalidField:
    """The item, cut or refused where it is too long. ``packed_in``: the field that holds packed items."""
    if isinstance(item, InvalidField) or len(item) <= room:
        return item
    if room > 0 and truncation == common_pb2.TRUNCATION_RIGHT:
        return item[:room]
    if room > 0 and truncation == common_pb2.TRUNCATION_LEFT:
        return item[-room:]
    problem = f"has {len(item)} tokens; allowed: at most {max(0, room)} beside the query unless truncation is set"
    if packed_in:
        return InvalidField(packed_in, f"item {index} {problem}")
    return InvalidField(f"items[{index}]", problem)
