"""EmbedService: texts to vectors."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np

from pyruntime.errors import InvalidField, NotFound, NotImplementedYet, PyruntimeError
from pyruntime.registry import ServedModel
from pyruntime.service.convert import POOLING_OF, Stopwatch, dense_embedding, usage
from pyruntime.service.inputs import Reading, TokenLimit, read_inputs, size_of
from pyruntime.service.room import ServiceRoom, good_ones, refuse_if_all_failed
from pyruntime.service.status import to_status
from pyruntime.service.validate import check_count, check_enum, check_request_id, check_text, optional, text_bytes
from pyruntime.types import Capability, EmbedRequest, EmbedResult, ModelInfo
from pyruntime.v1 import common_pb2, embed_pb2, embed_pb2_grpc


@dataclass(frozen=True)
class Prompt:
    """Text before each text input, and the request field that asked for it (empty: the model's default)."""

    text: str = ""
    field: str = ""


class EmbedServicer(embed_pb2_grpc.EmbedServiceServicer):
    """Validates, tokenises, hands to the engine, encodes."""

    def __init__(self, room: ServiceRoom) -> None:
        self._room = room

    async def Embed(
        self, request: embed_pb2.EmbedRequest, context: grpc.aio.ServicerContext
    ) -> embed_pb2.EmbedResponse:
        watch = Stopwatch()
        self._check(request)
        model = self._room.registry.resolve(request.model, Capability.EMBED)
        job = _engine_options(request, model.info)
        reading = self._reading(request, model)
        self._check_sizes(request, model.info, job["dimensions"], reading.prompt)
        sequences = await read_inputs(self._room.workers, model, request.inputs, reading)
        watch.tokenized()
        answers, step = await model.engine.embed(
            EmbedRequest(inputs=good_ones(sequences), priority=request.priority, request_id=request.request_id, **job)
        )
        remaining = iter(answers)
        outcomes = [
            each if isinstance(each, InvalidField) else _encoded(next(remaining), request.encoding)
            for each in sequences
        ]
        refuse_if_all_failed(outcomes)
        response = embed_pb2.EmbedResponse(model=model.info.name, usage=usage(answers))
        for index, outcome in enumerate(outcomes):
            result = response.results.add(index=index)
            if isinstance(outcome, PyruntimeError):
                result.error.CopyFrom(to_status(outcome))
            else:
                result.MergeFrom(outcome)
        response.timing.CopyFrom(watch.timing(step))
        return response

    async def EmbedStream(
        self, request_iterator: AsyncIterator[embed_pb2.EmbedRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[embed_pb2.EmbedResponse]:
        raise NotImplementedYet("EmbedStream is not served by this version; use Embed")
        yield  # makes this an async generator, as the method's kind demands

    def _check(self, request: embed_pb2.EmbedRequest) -> None:
        """The checks that need no model."""
        check_request_id(request.request_id)
        self._room.check_inputs("inputs", len(request.inputs))
        check_enum("kind", request.kind, embed_pb2.EmbeddingKind)
        check_enum("pooling", request.pooling, embed_pb2.Pooling)
        check_enum("encoding", request.encoding, embed_pb2.Encoding)
        check_enum("truncation", request.truncation, common_pb2.Truncation)
        if request.HasField("prompt") and request.HasField("prompt_name"):
            raise InvalidField("prompt", "is set together with prompt_name; allowed: one of them")
        check_text("prompt", request.prompt, self._room.input_limits.max_text_bytes, may_be_blank=True)
        if request.kind not in (embed_pb2.EMBEDDING_KIND_UNSPECIFIED, embed_pb2.EMBEDDING_KIND_DENSE):
            kind = embed_pb2.EmbeddingKind.Name(request.kind)
            raise NotImplementedYet(f"kind {kind} is not served by this version; use EMBEDDING_KIND_DENSE")

    def _reading(self, request: embed_pb2.EmbedRequest, model: ServedModel) -> Reading:
        prompt = choose_prompt(request, model.info)
        return Reading(
            "inputs",
            self._room.input_limits,
            prompt=prompt.text,
            prompt_field=prompt.field,
            token_limit=_token_limit(request, model),
        )

    def _check_sizes(self, request: embed_pb2.EmbedRequest, info: ModelInfo, dimensions: int, prompt: str) -> None:
        """What the request asks for in all, before anything is tokenised."""
        prompt_bytes = text_bytes(prompt)
        self._room.check_request_text("inputs", sum(size_of(each, prompt_bytes) for each in request.inputs))
        count = len(request.inputs)
        vector = dense_embedding(np.ones(dimensions, np.float32), request.encoding, "encoding")
        largest = embed_pb2.EmbedResult(index=count, dense=vector, prompt_tokens=info.context_length)
        self._room.check_response_size("inputs", largest, count)


def choose_prompt(request: embed_pb2.EmbedRequest, info: ModelInfo) -> Prompt:
    """The request's prompt, else the named one, else the model's default. ``NotFound`` for an unknown name."""
    if request.HasField("prompt"):
        return Prompt(request.prompt, "prompt" if request.prompt else "")
    asked = request.HasField("prompt_name")
    name = request.prompt_name if asked else info.default_prompt_name
    if not name:
        return Prompt()
    if name not in info.prompts:
        raise NotFound("prompt_name", name, list(info.prompts))
    return Prompt(info.prompts[name], "prompt_name" if asked else "")


def _engine_options(request: embed_pb2.EmbedRequest, info: ModelInfo) -> dict[str, Any]:
    dimensions = optional(request, "dimensions", info.embedding_dimensions)
    check_count("dimensions", dimensions, 1, info.embedding_dimensions)
    return {
        "pooling": POOLING_OF.get(request.pooling, info.default_pooling),
        "normalize": optional(request, "normalize", info.normalize_default),
        "dimensions": dimensions,
    }


def _token_limit(request: embed_pb2.EmbedRequest, model: ServedModel) -> TokenLimit:
    longest = model.info.context_length
    max_tokens = optional(request, "max_tokens", longest)
    # Truncation keeps the special tokens, so there must be room for them and for one token of text.
    check_count("max_tokens", max_tokens, 1 + model.tokenizer.num_special, longest)
    return TokenLimit(max_tokens, request.truncation)


def _encoded(answer: EmbedResult, encoding: embed_pb2.Encoding) -> embed_pb2.EmbedResult | PyruntimeError:
    """The answer without its index, or what is wrong with it."""
    if answer.error is not None:
        return answer.error
    try:
        dense = dense_embedding(np.asarray(answer.values), encoding, "encoding")
    except PyruntimeError as error:
        return error
    return embed_pb2.EmbedResult(dense=dense, prompt_tokens=answer.prompt_tokens)
