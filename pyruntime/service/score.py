"""ScoreService: label scores behind a query, for each item. Rerank and Classify have files of their own."""

from __future__ import annotations

import grpc

from pyruntime.errors import InvalidField, PyruntimeError
from pyruntime.registry import ServedModel
from pyruntime.service.classify import classify
from pyruntime.service.convert import Stopwatch, usage
from pyruntime.service.distinct import Distinct, distinct
from pyruntime.service.inputs import size_of
from pyruntime.service.rerank import rerank
from pyruntime.service.room import ServiceRoom, measure, refuse_if_all_failed
from pyruntime.service.score_heads import check_total_tokens, has_classifier, score_by_head, score_by_labels, score_task
from pyruntime.service.score_inputs import (
    ScoreInputs,
    count_packed,
    read_label_ids,
    read_packed_inputs,
    read_score_inputs,
)
from pyruntime.service.status import to_status
from pyruntime.service.validate import check_enum, check_length, check_range, check_request_id, optional, text_bytes
from pyruntime.types import Capability, ScoreResult
from pyruntime.v1 import common_pb2, score_pb2, score_pb2_grpc


class ScoreServicer(score_pb2_grpc.ScoreServiceServicer):
    """Validates, tokenises, hands to the engine."""

    def __init__(self, room: ServiceRoom) -> None:
        self._room = room

    async def Score(
        self, request: score_pb2.ScoreRequest, context: grpc.aio.ServicerContext
    ) -> score_pb2.ScoreResponse:
        watch = Stopwatch()
        self._check(request)
        model = self._room.registry.resolve(request.model, Capability.SCORE)
        self._check_labels(request, model)
        size = measure([request.query, *request.items])
        with self._room.admitted(context, model, score_task(model), request.priority, size) as ticket:
            inputs, label_ids = await self._read(model, request)
            total = check_total_tokens("items", inputs.items)
            work: Distinct[list[int]] = await self._room.workers.run(total, distinct, inputs.items, tuple)
            watch.tokenized()
            if has_classifier(model):
                answers, step = await score_by_head(model, request, inputs.prefix, work.inputs, ticket)
            else:
                answers, step = await score_by_labels(model, request, inputs.prefix, work.inputs, label_ids, ticket)
            outcomes = work.spread(answers)
            refuse_if_all_failed(outcomes)
            good = [each for each in outcomes if isinstance(each, ScoreResult)]
            response = score_pb2.ScoreResponse(model=model.info.name, usage=usage(good))
            response.results.extend(_result(index, outcome) for index, outcome in enumerate(outcomes))
            watch.stamp(response, step)
            return response

    async def Rerank(
        self, request: score_pb2.RerankRequest, context: grpc.aio.ServicerContext
    ) -> score_pb2.RerankResponse:
        return await rerank(self._room, request, context)

    async def Classify(
        self, request: score_pb2.ClassifyRequest, context: grpc.aio.ServicerContext
    ) -> score_pb2.ClassifyResponse:
        return await classify(self._room, request, context)

    def _check(self, request: score_pb2.ScoreRequest) -> None:
        """The checks that need no model."""
        check_request_id(request.request_id)
        check_enum("truncation", request.truncation, common_pb2.Truncation)
        temperature = optional(request, "temperature", 1.0)
        check_range("temperature", temperature, 0, 100, open_low=True)
        if temperature != 1 and not request.apply_softmax:
            raise InvalidField("temperature", f"{temperature:g} has no effect without apply_softmax; allowed: 1")
        for name in ("labels", "label_token_ids"):
            check_length(name, len(getattr(request, name)), self._room.settings.max_labels_per_request)
        texts = sum(map(size_of, [request.query, *request.items])) + sum(map(text_bytes, request.labels))
        if not request.HasField("delimiter_token_id"):
            self._room.check_inputs("items", len(request.items))
            self._room.check_request_text("items", texts)
            return
        if request.items:
            raise InvalidField("items", "must be absent with delimiter_token_id: the query holds them")
        if request.item_first:
            raise InvalidField("item_first", "is not allowed with delimiter_token_id")
        if request.query.WhichOneof("value") != "token_ids":
            raise InvalidField("query", "must be token_ids with delimiter_token_id")
        self._room.check_request_text("query", texts)

    def _check_labels(self, request: score_pb2.ScoreRequest, model: ServedModel) -> None:
        if has_classifier(model):
            if request.labels or request.label_token_ids:
                names = f"model {model.info.name!r} has labels of its own, which GetModel tells"
                raise InvalidField("labels" if request.labels else "label_token_ids", f"must be absent: {names}")
        elif bool(request.labels) == bool(request.label_token_ids):
            raise InvalidField("labels", "exactly one of labels and label_token_ids must be given")
        if not request.HasField("delimiter_token_id"):
            self._check_counts("items", len(request.items), _num_labels(request, model))

    def _check_counts(self, field: str, num_items: int, labels: int) -> None:
        """What the request asks for in all, before anything is tokenised."""
        self._room.check_inputs(field, num_items)
        self._room.check_scores(field, num_items, labels)
        many = 2**32 - 1
        largest = score_pb2.ItemScore(index=num_items, scores=[1.0] * labels, prompt_tokens=many, cached_tokens=many)
        self._room.check_response_size(field, largest, num_items)

    async def _read(self, model: ServedModel, request: score_pb2.ScoreRequest) -> tuple[ScoreInputs, list[int]]:
        workers, limits = self._room.workers, self._room.input_limits
        if not request.HasField("delimiter_token_id"):
            label_ids = await read_label_ids(workers, model, request, limits)
            return await read_score_inputs(workers, model, request, limits), label_ids
        size = size_of(request.query)
        num_items = await workers.run(size, count_packed, request)
        self._check_counts("query.token_ids", max(1, num_items), _num_labels(request, model))
        inputs = await workers.run(size, read_packed_inputs, model, request, limits)
        return inputs, await read_label_ids(workers, model, request, limits)


def _num_labels(request: score_pb2.ScoreRequest, model: ServedModel) -> int:
    """Scores that each item gets."""
    if has_classifier(model):
        return len(model.info.labels)
    return len(request.labels) or len(request.label_token_ids)


def _result(index: int, outcome: ScoreResult | PyruntimeError) -> score_pb2.ItemScore:
    if isinstance(outcome, PyruntimeError):
        return score_pb2.ItemScore(index=index, error=to_status(outcome))
    return score_pb2.ItemScore(
        index=index, scores=outcome.scores, prompt_tokens=outcome.prompt_tokens, cached_tokens=outcome.cached_tokens
    )
