"""Calls of every kind to small models, with the answers that they get when nothing else runs."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from random import Random
from typing import Any

import grpc

from pyruntime.v1 import (
    common_pb2,
    embed_pb2,
    embed_pb2_grpc,
    generate_pb2,
    generate_pb2_grpc,
    score_pb2,
    score_pb2_grpc,
)
from tests.models.texts import text

DECODER, RANKER = "decoder", "ranker"


@dataclass(slots=True)
class Kind:
    """One request. ``expected``: what it is answered with, timing and cached tokens left out."""

    service: str
    method: str
    request: Any
    expected: Any = None

    def start(self, stubs: dict[str, Any], *, priority: int = 0, timeout: float | None = None) -> Any:
        request = type(self.request)()
        request.CopyFrom(self.request)
        request.priority = priority
        return getattr(stubs[self.service], self.method)(request, timeout=timeout)

    async def read(self, call: Any, pause_s: float = 0.0) -> Any:
        """What matters of the answer; a pause before each message of a stream."""
        if not isinstance(call, grpc.aio.UnaryStreamCall):
            return _whole(await call)
        texts, ids, ends, last = {}, {}, [], None
        while (chunk := await call.read()) is not grpc.aio.EOF:
            assert last is None, "a message after the last one"
            texts[chunk.index] = texts.get(chunk.index, "") + chunk.text
            ids.setdefault(chunk.index, []).extend(chunk.token_ids)
            ends += [(chunk.index, chunk.finish_reason)] if chunk.finish_reason else []
            last = chunk.usage if chunk.HasField("usage") else None
            if pause_s:
                await asyncio.sleep(pause_s)
        if (code := await call.code()) is not grpc.StatusCode.OK:
            raise grpc.aio.AioRpcError(code, await call.initial_metadata(), await call.trailing_metadata())
        return sorted(texts.items()), sorted(ids.items()), sorted(ends), last.completion_tokens

    def check(self, answer: Any) -> None:
        assert answer == self.expected


class MixedCalls:
    """Make it with ``answered_alone``."""

    def __init__(self, kinds: list[Kind]) -> None:
        self.kinds = kinds

    @classmethod
    async def answered_alone(cls, channel: grpc.aio.Channel, draw: Random) -> MixedCalls:
        stubs = {
            "generate": generate_pb2_grpc.GenerateServiceStub(channel),
            "embed": embed_pb2_grpc.EmbedServiceStub(channel),
            "score": score_pb2_grpc.ScoreServiceStub(channel),
        }
        kinds = [make(draw, i) for make in (_generate, _stream, _embed, _score, _classify, _head) for i in range(6)]
        for kind in kinds:
            kind.expected = await kind.read(kind.start(stubs))
        return cls(kinds)


def _words(draw: Random, most: int) -> str:
    """A third of the texts begin alike."""
    shared = text(0, 20) + " " if draw.random() < 0.35 else ""
    return shared + text(draw.randrange(10**6), draw.randint(1, most))


def _prompt(draw: Random, place: int) -> generate_pb2.GenerateRequest:
    return generate_pb2.GenerateRequest(
        model=DECODER,
        text=_words(draw, 60),
        n=draw.choice([1, 1, 2, 3]),
        sampling=generate_pb2.Sampling(temperature=place % 2, seed=place),
        stop=generate_pb2.Stop(
            max_new_tokens=draw.choice([1, 10, 60, 200]), ignore_eos=True, strings=["a"] * (place % 3 == 0)
        ),
        logprobs=generate_pb2.LogprobOptions(enabled=place % 3 == 1, top=20 * (place % 3 == 1)),
    )


def _generate(draw: Random, place: int) -> Kind:
    return Kind("generate", "Generate", _prompt(draw, place))


def _stream(draw: Random, place: int) -> Kind:
    return Kind("generate", "GenerateStream", _prompt(draw, place))


def _embed(draw: Random, place: int) -> Kind:
    request = embed_pb2.EmbedRequest(
        model=DECODER, inputs=_inputs(draw, 4, 80), pooling=1 + place % 3, encoding=embed_pb2.ENCODING_FLOAT32_LE
    )
    return Kind("embed", "Embed", request)


def _score(draw: Random, place: int) -> Kind:
    return Kind("score", "Score", _items(draw, DECODER, labels=["a", "b", "c"], apply_softmax=place % 2 == 0))


def _head(draw: Random, place: int) -> Kind:
    return Kind("score", "Score", _items(draw, RANKER))


def _classify(draw: Random, place: int) -> Kind:
    request = score_pb2.ClassifyRequest(model=RANKER, inputs=_inputs(draw, 4, 80), raw_scores=place % 2 == 0)
    return Kind("score", "Classify", request)


def _items(draw: Random, model: str, **fields: Any) -> score_pb2.ScoreRequest:
    query = common_pb2.Input(text=_words(draw, 60))
    return score_pb2.ScoreRequest(model=model, query=query, items=_inputs(draw, 6, 12), **fields)


def _inputs(draw: Random, most: int, words: int) -> list[common_pb2.Input]:
    return [common_pb2.Input(text=_words(draw, words)) for _ in range(draw.randint(1, most))]


def _whole(response: Any) -> bytes:
    """A unary answer without what depends on the moment."""
    response.ClearField("timing")
    response.usage.ClearField("cached_tokens")
    for result in getattr(response, "results", ()):
        if "cached_tokens" in result.DESCRIPTOR.fields_by_name:
            result.ClearField("cached_tokens")
        assert not result.HasField("error"), result.error
    return response.SerializeToString(deterministic=True)
