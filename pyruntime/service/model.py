"""ModelService: what is served, and its tokenizers."""

from __future__ import annotations

import grpc

from pyruntime.errors import InvalidField
from pyruntime.registry import ServedModel
from pyruntime.service.convert import model_message
from pyruntime.service.inputs import read_prompt
from pyruntime.service.pairs import read_pair
from pyruntime.service.rerank import shown_ids
from pyruntime.service.room import ServiceRoom
from pyruntime.service.validate import check_length, check_token_ids, optional
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
        kind = request.WhichOneof("input")
        if kind is None:
            raise InvalidField("input", "is not set; allowed: one of text, chat, pair, rerank")
        if kind in ("pair", "rerank"):
            return await self._tokenize_two(model, request)
        workers, special = self._room.workers, optional(request, "special_tokens")
        limits = self._room.input_limits
        ids = await read_prompt(workers, model, request, limits, special_tokens=special, may_be_blank=True)
        return await workers.run(len(ids), _tokens, model, ids)

    async def _tokenize_two(self, model: ServedModel, request: model_pb2.TokenizeRequest) -> model_pb2.TokenizeResponse:
        if request.HasField("special_tokens"):
            raise InvalidField("special_tokens", "is for text and chat; allowed: unset for two texts")
        if request.HasField("pair"):
            ids = (await read_pair(self._room.workers, model, request.pair, self._room.input_limits)).ids
        else:
            ids = await shown_ids(self._room, model, request.rerank)
        return await self._room.workers.run(len(ids), _tokens, model, ids)

    async def Detokenize(
        self, request: model_pb2.DetokenizeRequest, context: grpc.aio.ServicerContext
    ) -> model_pb2.DetokenizeResponse:
        model = self._room.registry.resolve(request.model, None)
        most = self._room.input_limits.max_text_bytes
        check_length("token_ids", len(request.token_ids), most)
        return await self._room.workers.run(len(request.token_ids), _text, model, request, most)


def _tokens(model: ServedModel, ids: list[int]) -> model_pb2.TokenizeResponse:
    return model_pb2.TokenizeResponse(model=model.info.name, token_ids=ids, pieces=model.tokenizer.pieces(ids))


def _text(model: ServedModel, request: model_pb2.DetokenizeRequest, most: int) -> model_pb2.DetokenizeResponse:
    ids = check_token_ids("token_ids", request.token_ids, model.info.vocab_size, most)
    skip = optional(request, "skip_special_tokens", True)
    text = model.tokenizer.decode(ids, skip_special_tokens=skip)
    return model_pb2.DetokenizeResponse(model=model.info.name, text=text)
