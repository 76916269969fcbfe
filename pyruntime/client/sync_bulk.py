"""The blocking client's methods for more inputs than one request takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Unpack

import numpy as np

from pyruntime.client import bulk, messages, ranking
from pyruntime.client.calls import Calls
from pyruntime.client.messages import Text
from pyruntime.client.options import ClassifyOptions, EmbedOptions, Kind, RerankOptions, ScoreOptions
from pyruntime.client.ranking import Classes, RankedDocument
from pyruntime.v1 import embed_pb2_grpc, score_pb2_grpc


class BulkMethods:
    """Part of ``Client``. Each takes its inputs in requests of ``batch_size``, and outlives a break of the
    connection or a restart of the server: what was answered is kept, what was not is sent again
    (``Retry.patience_s``).

    timeout_s   ``embed_stream``, ``embed_many``: for all of it, by default none; the others: for a request
    progress    shows a bar on standard error; None: where that is a terminal
    """

    calls: Calls
    embed_stub: embed_pb2_grpc.EmbedServiceStub
    score_stub: score_pb2_grpc.ScoreServiceStub
    _model: str

    def embed_stream(
        self,
        inputs: Iterable[Text],
        *,
        kind: Kind = "dense",
        batch_size: int = bulk.BATCH_SIZE,
        model: str = "",
        timeout_s: float | None = None,
        return_errors: bool = False,
        progress: bool | None = False,
        **options: Unpack[EmbedOptions],
    ) -> Iterator[Any]:
        """An embedding for each input, in their order; of kinds and ``options`` as ``embed`` has them.

        Takes ``inputs`` as it goes, a few requests ahead, on the caller's thread: they need not fit into memory.
        ``return_errors``: yields the ``ApiError`` of a bad input in its place instead of raising it.
        Closing the iterator stops the work.

            with open("texts.txt") as lines:
                for vector in client.embed_stream(line.strip() for line in lines):
                    index.add(vector)
        """
        given = {**options, "kind": kind}
        asked = bulk.requests(
            bulk.batches(inputs, batch_size),
            lambda batch: messages.embed_request(batch, model or self._model, given),
        )
        start = 0
        with bulk.progress_bar(inputs, progress) as bar:
            for response in self.calls.resumed(
                self.embed_stub.EmbedStream, asked, timeout_s, options.get("request_id")
            ):
                yield from bulk.results(response, start, return_errors)
                start += len(response.results)
                bar.update(len(response.results))

    def embed_many(
        self,
        inputs: Iterable[Text],
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
        return messages.together(list(stream))

    def score_many(
        self,
        query: Text,
        items: Iterable[Text],
        labels: Sequence[str] | Sequence[int] | np.ndarray = (),
        *,
        batch_size: int = bulk.BATCH_SIZE,
        model: str = "",
        timeout_s: float | None = None,
        progress: bool | None = None,
        **options: Unpack[ScoreOptions],
    ) -> np.ndarray:
        """As ``score``, of any number of items: float32 [items, labels]."""

        def ask(part: list[Text]) -> list[np.ndarray]:
            request = messages.score_request(query, part, labels, model or self._model, options)
            response = self.calls.answer(self.score_stub.Score, request, timeout_s, patient=True)
            return messages.good(messages.each_score(response))

        rows = [row for _, rows in self._parts(items, batch_size, progress, ask) for row in rows]
        return np.stack(rows) if rows else np.zeros((0, len(labels)), np.float32)

    def rerank_many(
        self,
        query: str,
        documents: Iterable[str],
        *,
        top_n: int | None = None,
        batch_size: int = bulk.BATCH_SIZE,
        model: str = "",
        timeout_s: float | None = None,
        progress: bool | None = None,
        **options: Unpack[RerankOptions],
    ) -> list[RankedDocument]:
        """As ``rerank``, of any number of documents: a document's score does not depend on the others."""

        def ask(part: list[str]) -> list[RankedDocument]:
            request = ranking.rerank_request(query, part, model or self._model, options)
            return ranking.ranking(self.calls.answer(self.score_stub.Rerank, request, timeout_s, patient=True))

        parts = self._parts(documents, batch_size, progress, ask)
        return bulk.best((each for start, ranked in parts for each in bulk.moved(ranked, start)), top_n)

    def classify_many(
        self,
        inputs: Iterable[Text | tuple[Text, Text]],
        *,
        batch_size: int = bulk.BATCH_SIZE,
        model: str = "",
        timeout_s: float | None = None,
        progress: bool | None = None,
        **options: Unpack[ClassifyOptions],
    ) -> list[Classes]:
        """As ``classify``, of any number of texts or pairs."""

        def ask(part: list[Any]) -> list[Classes]:
            request = ranking.classify_request(part, model or self._model, options)
            return ranking.classifications(
                self.calls.answer(self.score_stub.Classify, request, timeout_s, patient=True)
            )

        return [each for _, part in self._parts(inputs, batch_size, progress, ask) for each in part]

    def _parts(
        self, inputs: Iterable[Any], batch_size: int, progress: bool | None, ask: Any
    ) -> Iterator[tuple[int, Any]]:
        """Where each part begins, and what ``ask`` answers to it."""
        start = 0
        with bulk.progress_bar(inputs, progress) as bar:
            for part in bulk.batches(inputs, batch_size):
                with bulk.part_from(start):
                    answered = ask(part)
                yield start, answered
                start += len(part)
                bar.update(len(part))
