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
from pyruntime.service.inputs import TokenLimit, encode_inputs
from pyruntime.service.room import ServiceRoom, good_ones, refuse_if_all_failed
from pyruntime.service.status import to_status
from pyruntime.service.validate import check_count, check_enum, check_request_id, check_text, optional
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
        sequences = await self._room.workers.run(request.ByteSize(), self._tokenize, model, request)
        watch.tokenized()
        answers, step = await model.engine.embed(
            EmbedRequest(inputs=good_ones(sequences), priority=request.priority, request_id=request.request_id, **job)
        )
        refuse_if_all_failed(answers)
        response = embed_pb2.EmbedResponse(model=model.info.name, usage=usage(answers))
        remaining = iter(answers)
        for index, each in enumerate(sequences):
            answer = each if isinstance(each, InvalidField) else next(remaining)
            response.results.append(_result(index, answer, request.encoding))
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
        check_text("prompt", request.prompt, self._room.settings.max_text_bytes, may_be_blank=True)
        if request.kind not in (embed_pb2.EMBEDDING_KIND_UNSPECIFIED, embed_pb2.EMBEDDING_KIND_DENSE):
            kind = embed_pb2.EmbeddingKind.Name(request.kind)
            raise NotImplementedYet(f"kind {kind} is not served by this version; use EMBEDDING_KIND_DENSE")

    def _tokenize(self, model: ServedModel, request: embed_pb2.EmbedRequest) -> list[list[int] | InvalidField]:
        prompt = choose_prompt(request, model.info)
        limit = _token_limit(request, model)
        sequences = encode_inputs(
            model,
            request.inputs,
            "inputs",
            self._room.settings.max_text_bytes,
            prompt=prompt.text,
            prompt_field=prompt.field,
        )
        for index, ids in enumerate(sequences):
            try:
                if not isinstance(ids, InvalidField):
                    sequences[index] = limit.fit(model, ids, f"inputs[{index}]")
            except InvalidField as error:
                sequences[index] = error
        return sequences


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


def _result(index: int, answer: EmbedResult | InvalidField, encoding: embed_pb2.Encoding) -> embed_pb2.EmbedResult:
    try:
        if isinstance(answer, InvalidField):
            raise answer
        if answer.error is not None:
            raise answer.error
        dense = dense_embedding(np.asarray(answer.values), encoding, "encoding")
    except PyruntimeError as error:
        return embed_pb2.EmbedResult(index=index, error=to_status(error))
    return embed_pb2.EmbedResult(index=index, dense=dense, prompt_tokens=answer.prompt_tokens)
