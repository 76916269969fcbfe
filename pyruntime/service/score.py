"""ScoreService: label probabilities behind a query, for each item."""

from __future__ import annotations

import grpc

from pyruntime.errors import InvalidField, NotImplementedYet
from pyruntime.registry import ServedModel
from pyruntime.service.convert import Stopwatch, usage
from pyruntime.service.room import ServiceRoom, good_ones, refuse_if_all_failed
from pyruntime.service.score_inputs import ScoreInputs, read_label_ids, read_score_inputs
from pyruntime.service.status import to_status
from pyruntime.service.validate import check_enum, check_range, check_request_id, optional
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
        inputs, label_ids = await self._room.workers.run(request.ByteSize(), self._tokenize, model, request)
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
        refuse_if_all_failed(answers)
        response = score_pb2.ScoreResponse(model=model.info.name, usage=usage(answers))
        remaining = iter(answers)
        for index, item in enumerate(inputs.items):
            response.results.append(_result(index, item if isinstance(item, InvalidField) else next(remaining)))
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
        if not request.HasField("delimiter_token_id"):
            self._room.check_inputs("items", len(request.items))
            return
        if request.items:
            raise InvalidField("items", "must be absent with delimiter_token_id: the query holds them")
        if request.item_first:
            raise InvalidField("item_first", "is not allowed with delimiter_token_id")
        if request.query.WhichOneof("value") != "token_ids":
            raise InvalidField("query", "must be token_ids with delimiter_token_id")

    def _tokenize(self, model: ServedModel, request: score_pb2.ScoreRequest) -> tuple[ScoreInputs, list[int]]:
        labels = read_label_ids(model, request)
        inputs = read_score_inputs(model, request, self._room.settings.max_text_bytes)
        if request.HasField("delimiter_token_id"):
            self._room.check_inputs("query.token_ids", len(inputs.items))
        return inputs, labels


def _result(index: int, answer: ScoreResult | InvalidField) -> score_pb2.ItemScore:
    if isinstance(answer, InvalidField):
        return score_pb2.ItemScore(index=index, error=to_status(answer))
    if answer.error is not None:
        return score_pb2.ItemScore(index=index, error=to_status(answer.error))
    return score_pb2.ItemScore(
        index=index, scores=answer.scores, prompt_tokens=answer.prompt_tokens, cached_tokens=answer.cached_tokens
    )
