"""Classify: the model's own classes of each text, pair of texts or token."""

from __future__ import annotations

from typing import Any

import grpc
import numpy as np

from pyruntime.errors import InvalidField, PyruntimeError
from pyruntime.registry import ServedModel
from pyruntime.service.convert import Stopwatch, usage
from pyruntime.service.distinct import distinct
from pyruntime.service.inputs import Reading, TokenLimit, read_inputs, size_of
from pyruntime.service.pairs import Encoded, SecondLimit, classify_request, num_ids, read_pairs
from pyruntime.service.room import ServiceRoom, measure, refuse_if_all_failed
from pyruntime.service.status import to_status
from pyruntime.service.validate import check_count, check_enum, check_request_id, optional
from pyruntime.types import Capability, ClassifyResult, Task
from pyruntime.v1 import common_pb2, score_pb2

MOST = 2**32 - 1


async def classify(
    room: ServiceRoom, request: score_pb2.ClassifyRequest, context: grpc.aio.ServicerContext
) -> score_pb2.ClassifyResponse:
    """The whole RPC."""
    watch = Stopwatch()
    _check(room, request)
    model = room.registry.resolve(request.model, Capability.CLASSIFY)
    with room.admitted(context, model, Task.CLASSIFY, request.priority, measure(_texts(request))) as ticket:
        encoded = await _read(room, model, request)
        work = await room.workers.run(num_ids(encoded), distinct, encoded, Encoded.key)
        watch.tokenized()
        answers, step = await model.engine.classify(classify_request(work.inputs, request), ticket=ticket)
        outcomes = work.spread(answers)
        refuse_if_all_failed(outcomes)
        most = min(optional(request, "top_k", MOST), len(model.info.labels))
        num_rows = num_ids(encoded) if model.info.classifies_tokens else len(outcomes)
        response = await room.workers.run(num_rows * most, _response, outcomes, encoded, model, most)
        watch.stamp(response, step)
        return response


def _check(room: ServiceRoom, request: score_pb2.ClassifyRequest) -> None:
    """The checks that need no model."""
    check_request_id(request.request_id)
    check_enum("truncation", request.truncation, common_pb2.Truncation)
    check_count("top_k", optional(request, "top_k", 1), 1, MOST)
    if bool(request.inputs) == bool(request.pairs):
        raise InvalidField("inputs", "exactly one of inputs and pairs must be given")
    field = "inputs" if request.inputs else "pairs"
    room.check_inputs(field, len(getattr(request, field)))
    room.check_request_text(field, sum(map(size_of, _texts(request))))


def _texts(request: score_pb2.ClassifyRequest) -> list[common_pb2.Input]:
    return [*request.inputs, *(side for pair in request.pairs for side in (pair.first, pair.second))]


async def _read(
    room: ServiceRoom, model: ServedModel, request: score_pb2.ClassifyRequest
) -> list[Encoded | InvalidField]:
    if request.pairs:
        limit = SecondLimit(request.truncation)
        return await read_pairs(room.workers, model, request.pairs, room.input_limits, limit)
    token_limit = TokenLimit(model.info.context_length, request.truncation)
    reading = Reading("inputs", room.input_limits, token_limit=token_limit)
    read = await read_inputs(room.workers, model, request.inputs, reading)
    return [each if isinstance(each, InvalidField) else Encoded(each) for each in read]


def _good(outcomes: list[ClassifyResult | PyruntimeError]) -> list[Any]:
    return [each for each in outcomes if isinstance(each, ClassifyResult)]


def _response(
    outcomes: list[ClassifyResult | PyruntimeError],
    encoded: list[Encoded | InvalidField],
    model: ServedModel,
    most: int,
) -> score_pb2.ClassifyResponse:
    """Without the timing. An entry a token and label can be millions: not for the event loop."""
    response = score_pb2.ClassifyResponse(model=model.info.name, usage=usage(_good(outcomes)))
    for index, (outcome, source) in enumerate(zip(outcomes, encoded, strict=True)):
        response.results.append(_result(index, outcome, source, model, most))
    return response


def _result(
    index: int,
    outcome: ClassifyResult | PyruntimeError,
    source: Encoded | InvalidField,
    model: ServedModel,
    most: int,
) -> score_pb2.Classification:
    if isinstance(outcome, PyruntimeError):
        return score_pb2.Classification(index=index, error=to_status(outcome))
    result = score_pb2.Classification(index=index, prompt_tokens=outcome.prompt_tokens)
    scores = np.asarray(outcome.scores, np.float32)
    if scores.ndim == 1:
        result.scores.extend(_ranked(scores, model, most))
        return result
    assert isinstance(source, Encoded)
    pieces = model.tokenizer.pieces(source.ids)
    for token_id, piece, row in zip(source.ids, pieces, scores, strict=True):
        result.tokens.add(token_id=token_id, piece=piece, scores=_ranked(row, model, most))
    return result


def _ranked(scores: np.ndarray, model: ServedModel, most: int) -> list[score_pb2.LabelScore]:
    """Highest first, equal ones in the order of the head."""
    order = np.argsort(-scores, kind="stable")[:most]
    return [score_pb2.LabelScore(label=model.info.labels[place], score=scores[place]) for place in order]
