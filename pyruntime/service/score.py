"""ScoreService: label probabilities behind a query, for each item."""

from __future__ import annotations

import grpc

from pyruntime.errors import InvalidField, NotImplementedYet, PyruntimeError
from pyruntime.registry import ServedModel
from pyruntime.service.convert import Stopwatch, usage
from pyruntime.service.inputs import size_of
from pyruntime.service.room import ServiceRoom, good_ones, refuse_if_all_failed
from pyruntime.service.score_inputs import (
    ScoreInputs,
    num_labels,
    read_label_ids,
    read_packed_inputs,
    read_score_inputs,
)
from pyruntime.service.status import to_status
from pyruntime.service.validate import check_enum, check_length, check_range, check_request_id, optional, text_bytes
from pyruntime.types import Capability, ScoreRequest, ScoreResult
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
        inputs, label_ids = await self._read(model, request)
        watch.tokenized()
        answers, step = await model.engine.score(
            ScoreRequest(
                prefix=inputs.prefix,
                items=good_ones(inputs.items),
                label_ids=label_ids,
                apply_softmax=request.apply_softmax,
                temperature=optional(request, "temperature", 1.0),
                priority=request.priority,
                request_id=request.request_id,
            )
        )
        remaining = iter(answers)
        outcomes = [_outcome(each if isinstance(each, InvalidField) else next(remaining)) for each in inputs.items]
        refuse_if_all_failed(outcomes)
        response = score_pb2.ScoreResponse(model=model.info.name, usage=usage(answers))
        response.results.extend(_result(index, outcome) for index, outcome in enumerate(outcomes))
        response.timing.CopyFrom(watch.timing(step))
        return response

    async def Rerank(
        self, request: score_pb2.RerankRequest, context: grpc.aio.ServicerContext
    ) -> score_pb2.RerankResponse:
        raise NotImplementedYet("Rerank is not served by this version")

    async def Classify(
        self, request: score_pb2.ClassifyRequest, context: grpc.aio.ServicerContext
    ) -> score_pb2.ClassifyResponse:
        raise NotImplementedYet("Classify is not served by this version")

    def _check(self, request: score_pb2.ScoreRequest) -> None:
        """The checks that need no model."""
        check_request_id(request.request_id)
        check_enum("truncation", request.truncation, common_pb2.Truncation)
        temperature = optional(request, "temperature", 1.0)
        check_range("temperature", temperature, 0, 100, open_low=True)
        if temperature != 1 and not request.apply_softmax:
            raise InvalidField("temperature", f"{temperature:g} has no effect without apply_softmax; allowed: 1")
        if bool(request.labels) == bool(request.label_token_ids):
            raise InvalidField("labels", "exactly one of labels and label_token_ids must be given")
        for name in ("labels", "label_token_ids"):
            check_length(name, len(getattr(request, name)), self._room.settings.max_labels_per_request)
        if not request.HasField("delimiter_token_id"):
            self._check_counts("items", len(request.items), num_labels(request))
            texts = size_of(request.query) + sum(size_of(each) for each in request.items)
            self._room.check_request_text("items", texts + sum(text_bytes(label) for label in request.labels))
            return
        if request.items:
            raise InvalidField("items", "must be absent with delimiter_token_id: the query holds them")
        if request.item_first:
            raise InvalidField("item_first", "is not allowed with delimiter_token_id")
        if request.query.WhichOneof("value") != "token_ids":
            raise InvalidField("query", "must be token_ids with delimiter_token_id")

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
        self._room.check_request_text("query", size_of(request.query) + sum(map(text_bytes, request.labels)))
        inputs = await workers.run(size_of(request.query), read_packed_inputs, model, request, limits)
        self._check_counts("query.token_ids", len(inputs.items), num_labels(request))
        return inputs, await read_label_ids(workers, model, request, limits)


def _outcome(answer: ScoreResult | InvalidField) -> ScoreResult | PyruntimeError:
    if isinstance(answer, ScoreResult) and answer.error is not None:
        return answer.error
    return answer


def _result(index: int, outcome: ScoreResult | PyruntimeError) -> score_pb2.ItemScore:
    if isinstance(outcome, PyruntimeError):
        return score_pb2.ItemScore(index=index, error=to_status(outcome))
    return score_pb2.ItemScore(
        index=index, scores=outcome.scores, prompt_tokens=outcome.prompt_tokens, cached_tokens=outcome.cached_tokens
    )
