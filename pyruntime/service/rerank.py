"""Rerank: documents in the order of how well they answer a query, by whichever way the model has."""

from __future__ import annotations

from typing import TypeVar

import grpc
import numpy as np

from pyruntime.errors import CapabilityMissing, InvalidField, PyruntimeError
from pyruntime.registry import ServedModel
from pyruntime.rerank_template import RerankWay, rerank_way
from pyruntime.service.convert import Stopwatch, usage
from pyruntime.service.late_interaction import rank_by_tokens, read_rank_tokens
from pyruntime.service.rerank_job import Ranked, RankJob
from pyruntime.service.rerank_pairs import rank_by_pairs, read_rank_pairs
from pyruntime.service.rerank_prompt import rank_by_template, read_rank_prompt
from pyruntime.service.room import RequestSize, ServiceRoom, refuse_if_all_failed
from pyruntime.service.score_heads import score_task
from pyruntime.service.status import to_status
from pyruntime.service.validate import check_count, check_enum, check_request_id, check_text, optional, text_bytes
from pyruntime.types import Capability, Task
from pyruntime.v1 import common_pb2, model_pb2, score_pb2

T = TypeVar("T")

MOST = 2**32 - 1
RANK = {
    RerankWay.TEMPLATE: rank_by_template,
    RerankWay.PAIRS: rank_by_pairs,
    RerankWay.LATE_INTERACTION: rank_by_tokens,
}


async def rerank(
    room: ServiceRoom, request: score_pb2.RerankRequest, context: grpc.aio.ServicerContext
) -> score_pb2.RerankResponse:
    """The whole RPC."""
    watch = Stopwatch()
    _check(room, request)
    model = room.registry.resolve(request.model, Capability.RERANK)
    way = way_of(model)
    job = RankJob(room, model, request, _instruction(model, request))
    task = Task.EMBED if way is RerankWay.LATE_INTERACTION else score_task(model)
    num_bytes = sum(map(text_bytes, request.documents)) + text_bytes(request.query)
    with room.admitted(context, model, task, request.priority, RequestSize(num_bytes)) as ticket:
        outcomes, step = await RANK[way](job, ticket, watch)
        refuse_if_all_failed(outcomes)
        response = _response(request, outcomes)
        response.model = model.info.name
        watch.stamp(response, step)
        return response


def way_of(model: ServedModel) -> RerankWay:
    """``CapabilityMissing`` for a model without one."""
    way = rerank_way(model.info, model.rerank_template)
    if way is None:
        raise CapabilityMissing(
            f"model {model.info.name!r} has neither a rerank template nor a classifier of one label"
        )
    return way


def _instruction(model: ServedModel, request: score_pb2.RerankRequest) -> str | None:
    """The request's, else the template's own; ``InvalidField`` where the model takes none."""
    template = model.rerank_template
    own = template.instruction if template is not None else None
    if not request.HasField("instruction"):
        return own
    if own is None:
        raise InvalidField("instruction", f"is of no use: model {model.info.name!r} takes none; allowed: unset")
    return request.instruction


async def shown_ids(room: ServiceRoom, model: ServedModel, text: model_pb2.RerankText) -> list[int]:
    """The ids of one query and document as they would run; of late interaction the query's, then the document's."""
    way = way_of(model)
    request = score_pb2.RerankRequest(query=text.query, documents=[text.document])
    if text.HasField("instruction"):
        request.instruction = text.instruction
    try:
        _check(room, request)
        job = RankJob(room, model, request, _instruction(model, request))
        if way is RerankWay.PAIRS:
            (pair,) = await read_rank_pairs(job)
            return checked(pair).ids
        if way is RerankWay.TEMPLATE:
            prompt = await read_rank_prompt(job)
            return prompt.before + checked(prompt.items[0])
        query, _, documents = await read_rank_tokens(job)
        return query + checked(documents[0])
    except InvalidField as error:
        names = {"documents[0]": "document", "documents": "document"}
        raise InvalidField(f"rerank.{names.get(error.field, error.field)}", error.problem) from error


def checked(read: T | InvalidField) -> T:
    """What was read, unless it is an error."""
    if isinstance(read, InvalidField):
        raise read
    return read


def _check(room: ServiceRoom, request: score_pb2.RerankRequest) -> None:
    """The checks that need no model."""
    check_request_id(request.request_id)
    check_enum("truncation", request.truncation, common_pb2.Truncation)
    check_count("top_n", optional(request, "top_n", 1), 1, MOST)
    check_count("max_tokens_per_document", optional(request, "max_tokens_per_document", 1), 1, MOST)
    room.check_inputs("documents", len(request.documents))
    most = room.input_limits.max_text_bytes
    check_text("query", request.query, most)
    if request.HasField("instruction"):
        check_text("instruction", request.instruction, most)
    texts = [request.query, request.instruction, *request.documents]
    room.check_request_text("documents", sum(map(text_bytes, texts)))


def _response(request: score_pb2.RerankRequest, outcomes: list[Ranked | PyruntimeError]) -> score_pb2.RerankResponse:
    good = {index: each for index, each in enumerate(outcomes) if isinstance(each, Ranked)}
    response = score_pb2.RerankResponse(usage=usage(list(good.values())))
    # As float32, which is what the client sees: equal ones stay in the order of the request.
    order = sorted(good, key=lambda index: -np.float32(good[index].score))
    for index in order[: optional(request, "top_n", MOST)]:
        ranked = response.results.add(index=index, score=good[index].score)
        if request.return_documents:
            ranked.document = request.documents[index]
    for index, outcome in enumerate(outcomes):
        if isinstance(outcome, PyruntimeError):
            response.errors.add(index=index, error=to_status(outcome))
    return response
