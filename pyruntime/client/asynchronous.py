"""The client for asyncio; the twin of ``sync``, method for method."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import grpc
import numpy as np

from pyruntime.client import bulk, messages, ranking
from pyruntime.client.errors import ApiError
from pyruntime.client.followed import FollowedChannel, own_status
from pyruntime.client.messages import DEFAULT_TARGET, DEFAULT_TIMEOUT_S, Text
from pyruntime.client.ranking import Classes, RankedDocument
from pyruntime.client.sync import api_errors
from pyruntime.v1 import (
    embed_pb2,
    embed_pb2_grpc,
    generate_pb2,
    generate_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    score_pb2_grpc,
)

T = TypeVar("T")


class AsyncClient:
    """One connection to a server, for use by any number of tasks of one event loop. Failed calls raise ``ApiError``.

    target      host:port
    timeout_s   deadline of a call in seconds, unless the call gives its own
    model       for calls that name none; empty where the server has only one that fits
    """

    def __init__(self, target: str = DEFAULT_TARGET, *, timeout_s: float = DEFAULT_TIMEOUT_S, model: str = "") -> None:
        self._channel = FollowedChannel(grpc.aio.insecure_channel(target, options=messages.CHANNEL_OPTIONS))
        self._timeout_s = timeout_s
        self._model = model
        self._closed = False
        self.generate_stub = generate_pb2_grpc.GenerateServiceStub(self._channel)
        self.embed_stub = embed_pb2_grpc.EmbedServiceStub(self._channel)
        self.score_stub = score_pb2_grpc.ScoreServiceStub(self._channel)
        self.model_stub = model_pb2_grpc.ModelServiceStub(self._channel)

    async def close(self) -> None:
        """End the connection. Calls that are still open, streams included, end with ``ApiError`` CANCELLED.

        So do calls of the stubs, in grpc's own way: with ``asyncio.CancelledError``.
        """
        self._closed = True
        await self._channel.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def generate(
        self,
        prompt: Text | Sequence[Mapping[str, Any]],
        *,
        model: str = "",
        timeout_s: float | None = None,
        **options: Any,
    ) -> str:
        """The continuation of a text, token ids or chat messages; with ``n``, the first one.

        ``options``: temperature, top_p, top_k, min_p, seed, repetition_penalty, frequency_penalty, presence_penalty,
        logit_bias ({id: value}), logprobs (how many likeliest tokens to list, 0 or more),
        max_new_tokens, min_new_tokens, stop (a string or several), stop_token_ids, ignore_eos,
        include_stop_in_text, priority, request_id, prompt_logprobs (bool), logprob_token_ids (of which each token's
        place lists the log-probability), chunk_tokens (of streams: tokens in a piece at least), json_schema (text or
        object), regex, grammar or choice (what the text must conform to). Of messages: tools
        (dicts or JSON texts), continue_final_message, add_generation_prompt, template_arguments; what a message has
        beside ``role`` and ``content`` goes to the template too.
        """
        response = await self.complete(prompt, model=model, timeout_s=timeout_s, **options)
        return response.completions[0].text

    async def complete(
        self,
        prompt: Text | Sequence[Mapping[str, Any]],
        *,
        model: str = "",
        timeout_s: float | None = None,
        **options: Any,
    ) -> generate_pb2.GenerateResponse:
        """As ``generate``, with everything that the server says."""
        request = messages.generate_request(prompt, model or self._model, options)
        return await self._answer(self.generate_stub.Generate, request, timeout_s)

    async def stream(
        self,
        prompt: Text | Sequence[Mapping[str, Any]],
        *,
        model: str = "",
        timeout_s: float | None = None,
        **options: Any,
    ) -> AsyncGenerator[str, None]:
        """Pieces of the continuation as they come. Closing the iterator, or the client, stops the server's work."""
        chunks = self.stream_chunks(prompt, model=model, timeout_s=timeout_s, **options)
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                if chunk.index == 0 and chunk.text:
                    yield chunk.text

    async def stream_chunks(
        self,
        prompt: Text | Sequence[Mapping[str, Any]],
        *,
        model: str = "",
        timeout_s: float | None = None,
        **options: Any,
    ) -> AsyncGenerator[generate_pb2.GenerateChunk, None]:
        """As ``stream``, with everything that the server says."""
        request = messages.generate_request(prompt, model or self._model, options)
        call = self.generate_stub.GenerateStream(request, timeout=self._seconds(timeout_s))
        with self._following(call):
            async for chunk in call:
                yield chunk

    async def embed(
        self,
        inputs: Iterable[Text],
        *,
        kind: str = "dense",
        model: str = "",
        timeout_s: float | None = None,
        **options: Any,
    ) -> Any:
        """One embedding an input, in their order. Raises if any input is bad.

        ``kind``: "dense" gives float32 [N, D]; "sparse" a list of ``SparseVector``, token ids and their weights;
        "per_token" a list of float32 [L, D], a vector a token.
        ``options``: pooling ("last", "cls", "mean"), normalize, dimensions, truncation ("none", "right",
        "left"), max_tokens, prompt_name, prompt, priority, request_id.
        """
        request = messages.embed_request(inputs, model or self._model, options | {"kind": kind})
        response = await self._answer(self.embed_stub.Embed, request, timeout_s)
        return messages.embeddings(response)

    async def embed_stream(
        self,
        inputs: Iterable[Text] | AsyncIterable[Text],
        *,
        batch_size: int = bulk.BATCH_SIZE,
        model: str = "",
        timeout_s: float | None = None,
        return_errors: bool = False,
        **options: Any,
    ) -> AsyncGenerator[Any, None]:
        """An embedding for each input, in their order; of kinds and ``options`` as ``embed`` has them. For bulk work.

        Takes ``inputs`` as it goes, a few requests ahead.
        ``batch_size``: inputs in a request. ``return_errors``: yields the ``ApiError`` of a bad input in its place
        instead of raising it. ``timeout_s``: for all of it; none by default. Closing the iterator stops the work.
        """
        requests: asyncio.Queue[embed_pb2.EmbedRequest | None] = asyncio.Queue()
        call = self.embed_stub.EmbedStream(_until_none(requests), timeout=timeout_s)
        responses, in_flight = aiter(call), 0
        try:
            with self._following(call):
                async with own_status(call):
                    async for batch in bulk.batches_of_either(inputs, batch_size):
                        requests.put_nowait(messages.embed_request(batch, model or self._model, options))
                        in_flight += 1
                        if in_flight == bulk.IN_FLIGHT:
                            for each in bulk.results(await anext(responses), return_errors):
                                yield each
                            in_flight -= 1
                    requests.put_nowait(None)
                    async for response in responses:
                        for each in bulk.results(response, return_errors):
                            yield each
        finally:
            requests.put_nowait(None)  # grpc's own task waits for it

    async def score(
        self,
        query: Text,
        items: Iterable[Text],
        labels: Sequence[str] | Sequence[int] | np.ndarray = (),
        *,
        model: str = "",
        timeout_s: float | None = None,
        **options: Any,
    ) -> np.ndarray:
        """float32 [items, labels]: how likely each label is as the next token after query and item.

        Without ``labels``: those of the model's own head, in the order of ``Model.labels``.
        ``options``: apply_softmax, temperature, item_first, truncation, priority, request_id.
        """
        request = messages.score_request(query, items, labels, model or self._model, options)
        response = await self._answer(self.score_stub.Score, request, timeout_s)
        return messages.stacked(messages.each_score(response))

    async def rerank(
        self, query: str, documents: Iterable[str], *, model: str = "", timeout_s: float | None = None, **options: Any
    ) -> list[RankedDocument]:
        """The documents by how well they answer the query, highest score first. Raises if any document is bad.

        ``options``: instruction, top_n, return_documents, raw_scores, truncation ("none", "right", "left"),
        max_tokens_per_document, priority, request_id.
        """
        request = ranking.rerank_request(query, documents, model or self._model, options)
        return ranking.ranking(await self._answer(self.score_stub.Rerank, request, timeout_s))

    async def classify(
        self,
        inputs: Iterable[Text | tuple[Text, Text]],
        *,
        model: str = "",
        timeout_s: float | None = None,
        **options: Any,
    ) -> list[Classes]:
        """The classes of each text, or of each pair given as a tuple of two. Raises if any input is bad.

        ``options``: raw_scores, top_k, truncation ("none", "right", "left"), priority, request_id.
        """
        request = ranking.classify_request(inputs, model or self._model, options)
        return ranking.classifications(await self._answer(self.score_stub.Classify, request, timeout_s))

    async def models(self) -> list[model_pb2.Model]:
        """The models that are ready."""
        response = await self._answer(self.model_stub.ListModels, model_pb2.ListModelsRequest())
        return list(response.models)

    async def tokenize(
        self,
        text: str | Sequence[Mapping[str, Any]],
        *,
        model: str = "",
        special_tokens: bool | None = None,
        **options: Any,
    ) -> model_pb2.TokenizeResponse:
        """``token_ids`` and ``pieces`` of a text, or of messages with ``generate``'s ``options`` for those."""
        request = messages.tokenize_request(text, model or self._model, special_tokens, options)
        return await self._answer(self.model_stub.Tokenize, request)

    async def detokenize(self, token_ids: Sequence[int] | np.ndarray, *, model: str = "") -> str:
        """The text of token ids, without special tokens."""
        request = messages.detokenize_request(token_ids, model or self._model)
        response = await self._answer(self.model_stub.Detokenize, request)
        return response.text

    def _seconds(self, timeout_s: float | None) -> float:
        return self._timeout_s if timeout_s is None else timeout_s

    async def _answer(self, method: Any, request: Any, timeout_s: float | None = None) -> Any:
        call = method(request, timeout=self._seconds(timeout_s))
        with self._following(call):
            return await call

    @contextlib.contextmanager
    def _following(self, call: Any) -> Iterator[None]:
        """The call is open inside, and over behind it, however it ends."""
        try:
            with api_errors():
                yield
        except asyncio.CancelledError:
            # grpc tells of a call that ``close`` cancelled as if the task had been.
            task = asyncio.current_task()
            if self._closed and not (task is not None and task.cancelling()):
                raise ApiError("CANCELLED", "the client was closed while the call was open") from None
            raise
        finally:
            call.cancel()


async def _until_none(requests: asyncio.Queue[T | None]) -> AsyncIterator[T]:
    while (request := await requests.get()) is not None:
        yield request
