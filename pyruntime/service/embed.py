"""EmbedService: texts to vectors."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

import grpc

from pyruntime.errors import ComputeFault, InvalidField, InvalidFields, PyruntimeError, ResponseTooLarge
from pyruntime.service.convert import Stopwatch, usage
from pyruntime.service.embed_inputs import read_embed_inputs
from pyruntime.service.embed_plan import EmbedPlan, make_plan
from pyruntime.service.embed_stream import in_order, until_draining, when_admitted
from pyruntime.service.embed_vectors import encode
from pyruntime.service.room import ServiceRoom, refuse_if_all_failed
from pyruntime.service.status import to_status
from pyruntime.service.validate import check_message_size
from pyruntime.types import EmbeddingKind, EmbedResult, StepTiming, Task
from pyruntime.v1 import embed_pb2, embed_pb2_grpc

# What a request of a stream may end with and leave the stream: it lies in the inputs or in their computation.
_OF_THE_INPUTS = (InvalidField, InvalidFields, ComputeFault, ResponseTooLarge)
# Vectors of more bytes than this, about a millisecond's work, are encoded by a worker.
_INLINE_BYTES = 2**20
_FIELD_OF = {EmbeddingKind.DENSE: "dense", EmbeddingKind.SPARSE: "sparse", EmbeddingKind.PER_TOKEN: "tokens"}


class EmbedServicer(embed_pb2_grpc.EmbedServiceServicer):
    """Validates, tokenises, hands to the engine, encodes."""

    def __init__(self, room: ServiceRoom) -> None:
        self._room = room

    async def Embed(
        self, request: embed_pb2.EmbedRequest, context: grpc.aio.ServicerContext
    ) -> embed_pb2.EmbedResponse:
        watch = Stopwatch()
        return await self._answer(request, make_plan(self._room, request), context, watch)

    async def EmbedStream(
        self, request_iterator: AsyncIterator[embed_pb2.EmbedRequest], context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[embed_pb2.EmbedResponse, None]:
        async def answer(request: embed_pb2.EmbedRequest) -> embed_pb2.EmbedResponse:
            return await when_admitted(self._answer_of_stream, request, context)

        requests = until_draining(self._room.registry, request_iterator)
        async with contextlib.aclosing(requests), contextlib.aclosing(in_order(requests, answer)) as responses:
            async for response in responses:
                yield response

    async def _answer_of_stream(
        self, request: embed_pb2.EmbedRequest, context: grpc.aio.ServicerContext
    ) -> embed_pb2.EmbedResponse:
        """As ``Embed``; what is wrong with all inputs is each one's error, so that the stream goes on."""
        watch = Stopwatch()
        plan = make_plan(self._room, request)
        try:
            response = await self._answer(request, plan, context, watch, may_fail_whole=False)
            if plan.kind is EmbeddingKind.SPARSE:  # the size of the others was known before they were computed
                check_message_size(response, self._room.settings.max_message_bytes)
        except _OF_THE_INPUTS as error:
            response = _response(plan, [error] * len(request.inputs), may_fail_whole=False)
            watch.stamp(response, StepTiming(0.0, 0.0))
        return response

    async def _answer(
        self,
        request: embed_pb2.EmbedRequest,
        plan: EmbedPlan,
        context: grpc.aio.ServicerContext,
        watch: Stopwatch,
        may_fail_whole: bool = True,
    ) -> embed_pb2.EmbedResponse:
        size = plan.measure(self._room, request)
        results, step = list[EmbedResult](), StepTiming(0.0, 0.0)
        with self._room.admitted(context, plan.model, Task.EMBED, request.priority, size) as ticket:
            work = await read_embed_inputs(self._room, request, plan)
            watch.tokenized()
            lengths = [len(work.inputs[place].ids) for place in work.places if isinstance(place, int)]
            plan.check_response_size(self._room, lengths)
            if work.inputs:
                # A stream's requests wait for each other, so that their texts are computed together.
                at_once = may_fail_whole and self._room.is_alone()
                job = plan.job(request, work.inputs)
                results, step = await plan.model.engine.embed(job, ticket=ticket, at_once=at_once)
        outcomes = work.spread(results)
        # Of all inputs: those that were computed once are written as often as they came.
        if sum(each.nbytes for each in _values(outcomes)) > _INLINE_BYTES:
            response = await self._room.workers.run_aside(_response, plan, outcomes, may_fail_whole)
        else:
            response = _response(plan, outcomes, may_fail_whole)
        watch.stamp(response, step)
        return response


def _values(outcomes: Sequence[EmbedResult | PyruntimeError]) -> list[Any]:
    """What there is to encode."""
    return [each.values for each in outcomes if isinstance(each, EmbedResult) and each.error is None]


def _response(
    plan: EmbedPlan, outcomes: Sequence[EmbedResult | PyruntimeError], may_fail_whole: bool
) -> embed_pb2.EmbedResponse:
    """All of it but the timing. ``may_fail_whole``: raises when there is nothing but errors."""
    good = [each for each in outcomes if isinstance(each, EmbedResult)]
    payloads = iter(encode(plan.kind, [each.values for each in good], plan.encoding))
    encoded = [next(payloads) if isinstance(each, EmbedResult) else each for each in outcomes]
    if may_fail_whole:
        refuse_if_all_failed(encoded)
    response = embed_pb2.EmbedResponse(model=plan.model.info.name)
    answered = []
    for index, (outcome, payload) in enumerate(zip(outcomes, encoded, strict=True)):
        result = response.results.add(index=index)
        if isinstance(payload, PyruntimeError):
            result.error.CopyFrom(to_status(payload))
        else:
            assert isinstance(outcome, EmbedResult)
            getattr(result, _FIELD_OF[plan.kind]).ParseFromString(payload)
            result.prompt_tokens = outcome.prompt_tokens
            answered.append(outcome)
    response.usage.CopyFrom(usage(answered))
    return response
