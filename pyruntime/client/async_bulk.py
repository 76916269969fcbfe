"""The asyncio client's methods for more inputs than one request takes; the twin of ``sync_bulk``."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Sequence
from typing import Any, Unpack

import numpy as np

from pyruntime.client import bulk, messages, ranking
from pyruntime.client.async_calls import AsyncCalls
from pyruntime.client.messages import Text
from pyruntime.client.options import ClassifyOptions, EmbedOptions, Kind, RerankOptions, ScoreOptions
from pyruntime.client.ranking import Classes, RankedDocument
from pyruntime.v1 import embed_pb2_grpc, score_pb2_grpc


class AsyncBulkMethods:
    """Part of ``AsyncClient``. Each takes its inputs in requests of ``batch_size``, and outlives a break of the
    connection or a restart of the server: what was answered is kept, what was not is sent again
    (``Retry.patience_s``).

    timeout_s   ``embed_stream``, ``embed_many``: for all of it, by default none; the others: for a request
    progress    shows a bar on standard error; None: where that is a terminal
    """

    calls: AsyncCalls
    embed_stub: embed_pb2_grpc.EmbedServiceStub
    score_stub: score_pb2_grpc.ScoreServiceStub
    _model: str

    async def embed_stream(
        self,
        inputs: Iterable[Text] | AsyncIterable[Text],
        *,
        kind: Kind = "dense",
        batch_size: int = bulk.BATCH_SIZE,
        model: str = "",
        timeout_s: float | None = None,
        return_errors: bool = False,
        progress: bool | None = False,
        **options: Unpack[EmbedOptions],
    ) -> AsyncGenerator[Any, None]:
        """An embedding for each input, in their order; of kinds and ``options`` as ``embed`` has them.

        Takes ``inputs`` as it goes, a few requests ahead, so that they need not fit into memory.
        ``return_errors``: yields the ``ApiError`` of a bad input in its place instead of raising it.
        Closing the iterator stops the work.

            with open("texts.txt") as lines:
                async for vector in client.embed_stream(line.strip() for line in lines):
                    index.add(vector)
        """
        given = {**options, "kind": kind}
        asked = bulk.requests_of_either(
            bulk.batches_of_either(inputs, batch_size),
            lambda batch: messages.embed_request(batch, model or self._model, given),
        )
        responses = self.calls.resumed(self.embed_stub.EmbedStream, asked, timeout_s, options.get("request_id"))
        start = 0
        with bulk.progress_bar(inputs, progress) as bar:
            async with contextlib.aclosing(responses):
                async for response in responses:
                    for each in bulk.results(response, start, return_errors):
                        yield each
                    start += len(response.results)
                    bar.update(len(response.results))

    async def embed_many(
        self,
        inputs: Iterable[Text] | AsyncIterable[Text],
        *,
        kind: Kind = "dense",
        batch_size: int = bulk.BATCH_SIZE,
        model: str = "",
        timeout_s: float | None = None,
        progress: bool | None = None,
        **options: Unpack[EmbedOptions],
    ) -> Any:
        """As ``embed``, of any number of inputs: float32 [N, D], or a list for the other kinds."""
        stream = self.embed_stream(
            inputs,
            kind=kind,
            batch_size=batch_size,
            model=model,
            timeout_s=timeout_s,
            return_errors=False,
            progress=progress,
            **options,
        )
        return messages.together([each async for each in stream])

    async def score_many(
        self,
        query: Text,
        items: Iterable[Text] | AsyncIterable[Text],
        labels: Sequence[str] | Sequence[int] | np.ndarray = (),
        *,
        batch_size: int = bulk.BATCH_SIZE,
        model: str = "",
        timeout_s: float | None = None,
        progress: bool | None = None,
        **options: Unpack[ScoreOptions],
    ) -> np.ndarray:
        """As ``score``, of any number of items: float32 [items, labels]."""

        async def ask(part: list[Text]) -> list[np.ndarray]:
            request = messages.score_request(query, part, labels, model or self._model, options)
            response = await self.calls.answer(self.score_stub.Score, request, timeout_s, patient=True)
            return messages.good(messages.each_score(response))

        rows = [row async for _, rows in self._parts(items, batch_size, progress, ask) for row in rows]
        return np.stack(rows) if rows else np.zeros((0, len(labels)), np.float32)

    async def rerank_many(
        self,
        query: str,
        documents: Iterable[str] | AsyncIterable[str],
        *,
        top_n: int | None = None,
        batch_size: int = bulk.BATCH_SIZE,
        model: str = "",
        timeout_s: float | None = None,
        progress: bool | None = None,
        **options: Unpack[RerankOptions],
    ) -> list[RankedDocument]:
        """As ``rerank``, of any number of documents: a document's score does not depend on the others."""

        async def ask(part: list[str]) -> list[RankedDocument]:
            request = ranking.rerank_request(query, part, model or self._model, options)
            return ranking.ranking(await self.calls.answer(self.score_stub.Rerank, request, timeout_s, patient=True))

        parts = self._parts(documents, batch_size, progress, ask)
        return bulk.best([each async for start, ranked in parts for each in bulk.moved(ranked, start)], top_n)

    async def classify_many(
        self,
        inputs: Iterable[Text | tuple[Text, Text]] | AsyncIterable[Text | tuple[Text, Text]],
        *,
        batch_size: int = bulk.BATCH_SIZE,
        model: str = "",
        timeout_s: float | None = None,
        progress: bool | None = None,
        **options: Unpack[ClassifyOptions],
    ) -> list[Classes]:
        """As ``classify``, of any number of texts or pairs."""

        async def ask(part: list[Any]) -> list[Classes]:
            request = ranking.classify_request(part, model or self._model, options)
            return ranking.classifications(
                await self.calls.answer(self.score_stub.Classify, request, timeout_s, patient=True)
            )

        return [each async for _, part in self._parts(inputs, batch_size, progress, ask) for each in part]

    async def _parts(
        self, inputs: Iterable[Any] | AsyncIterable[Any], batch_size: int, progress: bool | None, ask: Any
    ) -> AsyncGenerator[tuple[int, Any], None]:
        """Where each part begins, and what ``ask`` answers to it."""
        start = 0
        with bulk.progress_bar(inputs, progress) as bar:
            async for part in bulk.batches_of_either(inputs, batch_size):
                with bulk.part_from(start):
                    answered = await ask(part)
                yield start, answered
                start += len(part)
                bar.update(len(part))
