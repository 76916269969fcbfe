"""ModelService: what is served, and its tokenizers."""

from __future__ import annotations

import grpc

from pyruntime.errors import InvalidField
from pyruntime.registry import ServedModel
from pyruntime.service.convert import model_message
from pyruntime.service.inputs import INLINE_BYTES, encode_prompt
from pyruntime.service.room import ServiceRoom
from pyruntime.service.validate import check_token_ids, optional
from pyruntime.v1 import model_pb2, model_pb2_grpc


class ModelServicer(model_pb2_grpc.ModelServiceServicer):
    """Answers from the registry and the tokenizers; the engines are not asked."""

    def __init__(self, room: ServiceRoom) -> None:
        self._room = room

    async def ListModels(
        self, request: model_pb2.ListModelsRequest, context: grpc.aio.ServicerContext
    ) -> model_pb2.ListModelsResponse:
        models = self._room.registry.serving()
        return model_pb2.ListModelsResponse(models=[model_message(each, self._room.settings) for each in models])

    async def GetModel(self, request: model_pb2.GetModelRequest, context: grpc.aio.ServicerContext) -> model_pb2.Model:
        return model_message(self._room.registry.resolve(request.model, None), self._room.settings)

    async def Tokenize(
        self, request: model_pb2.TokenizeRequest, context: grpc.aio.ServicerContext
    ) -> model_pb2.TokenizeResponse:
        model = self._room.registry.resolve(request.model, None)
        if request.WhichOneof("input") is None:
            raise InvalidField("input", "is not set; allowed: one of text, chat")
        # A template is a program of its own: a chat goes to a worker however short it is.
        size = request.ByteSize() if request.HasField("text") else INLINE_BYTES + 1
        return await self._room.workers.run(size, self._tokenize, model, request)

    async def Detokenize(
        self, request: model_pb2.DetokenizeRequest, context: grpc.aio.ServicerContext
    ) -> model_pb2.DetokenizeResponse:
        model = self._room.registry.resolve(request.model, None)
        ids = check_token_ids("token_ids", request.token_ids, model.info.vocab_size)
        skip = optional(request, "skip_special_tokens", True)
        text = await self._room.workers.run(request.ByteSize(), _decode, model, ids, skip)
        return model_pb2.DetokenizeResponse(model=model.info.name, text=text)

    def _tokenize(self, model: ServedModel, request: model_pb2.TokenizeRequest) -> model_pb2.TokenizeResponse:
        special = optional(request, "special_tokens")
        ids = encode_prompt(model, request, self._room.settings.max_text_bytes, special)
        pieces = model.tokenizer.pieces(ids)
        return model_pb2.TokenizeResponse(model=model.info.name, token_ids=ids, pieces=pieces)


def _decode(model: ServedModel, ids: list[int], skip_special_tokens: bool) -> str:
    return model.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
