"""The client for ordinary, blocking code."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Unpack

import numpy as np
from grpc_health.v1 import health_pb2_grpc

from pyruntime.client import messages, ranking
from pyruntime.client.calls import Calls
from pyruntime.client.connection import Security, open_channel
from pyruntime.client.messages import DEFAULT_TARGET, DEFAULT_TIMEOUT_S, Prompt, Text
from pyruntime.client.options import (
    ChatOptions,
    ClassifyOptions,
    EmbedOptions,
    GenerateOptions,
    Kind,
    RerankOptions,
    ScoreOptions,
)
from pyruntime.client.ranking import Classes, RankedDocument
from pyruntime.client.retry import Retry, checked_retry
from pyruntime.client.sync_bulk import BulkMethods
from pyruntime.v1 import (
    embed_pb2_grpc,
    generate_pb2,
    generate_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    score_pb2_grpc,
)


class Client(BulkMethods):
    """One connection to a server, for use by any number of threads: make one and keep it.

    Failed calls raise ``ApiError``.


    target      HOST:PORT, unix:PATH, or a name that gRPC resolves, as dns:///NAME:PORT
    timeout_s   deadline of a call in seconds, retries included, unless the call gives its own; None: no deadline,
                which bulk work has in any case
    model       for calls that name none; empty where the server has only one that fits
    retry       which failed calls are sent again; ``NEVER`` for none
    security    tls, root_certificates, certificate, key, server_name, token, metadata: see ``Security``

        with Client("models.example:50051", root_certificates="ca.pem", token=read_token) as client:
            client.generate("The three primary colours are", model="gemma-3-270m", max_new_tokens=24)

    ``generate_stub``, ``embed_stub``, ``score_stub``, ``model_stub`` and ``health_stub`` are gRPC's own stubs on this
    connection, for what has no method here; they show the token, but have no deadline and no retries of their own.
    """

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
        model: str = "",
        retry: Retry | None = None,
        **security: Unpack[Security],
    ) -> None:
        self._channel = open_channel(target, security)
        self._model = model
        self.calls = Calls(timeout_s, checked_retry(retry))
        self.generate_stub = generate_pb2_grpc.GenerateServiceStub(self._channel)
        self.embed_stub = embed_pb2_grpc.EmbedServiceStub(self._channel)
        self.score_stub = score_pb2_grpc.ScoreServiceStub(self._channel)
        self.model_stub = model_pb2_grpc.ModelServiceStub(self._channel)
        self.health_stub = health_pb2_grpc.HealthStub(self._channel)

    def close(self) -> None:
        """End the connection. Calls that are still open, streams included, and later ones end with CANCELLED."""
        self.calls.close()
        self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def generate(
        self, prompt: Prompt, *, model: str = "", timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> str:
        """The continuation of a text, token ids or chat messages; with ``n``, the first one.

        A message is a mapping with ``role`` and ``content``; what else it has goes to the model's template too.
        ``options``: see ``GenerateOptions``.

            client.generate([{"role": "user", "content": "Name a colour."}], temperature=0, stop=["\\n"])
            client.generate("As JSON: ", json_schema={"type": "array", "items": {"type": "integer"}})
        """
        return self.complete(prompt, model=model, timeout_s=timeout_s, **options).completions[0].text

    def complete(
        self, prompt: Prompt, *, model: str = "", timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> generate_pb2.GenerateResponse:
        """As ``generate``, with everything that the server says: every continuation, tokens, usage and so on."""
        request = messages.generate_request(prompt, model or self._model, options)
        return self.calls.answer(self.generate_stub.Generate, request, timeout_s)

    def stream(
        self, prompt: Prompt, *, model: str = "", timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Iterator[str]:
        """Pieces of the continuation as they come. Closing the iterator stops the server's work.

        for piece in client.stream("Once upon a time", max_new_tokens=50):
            print(piece, end="", flush=True)
        """
        for chunk in self.stream_chunks(prompt, model=model, timeout_s=timeout_s, **options):
            if chunk.index == 0 and chunk.text:
                yield chunk.text

    def stream_chunks(
        self, prompt: Prompt, *, model: str = "", timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Iterator[generate_pb2.GenerateChunk]:
        """As ``stream``, with everything that the server says."""
        request = messages.generate_request(prompt, model or self._model, options)
        yield from self.calls.stream(self.generate_stub.GenerateStream, request, timeout_s)

    def embed(
        self,
        inputs: Iterable[Text],
        *,
        kind: Kind = "dense",
        model: str = "",
        timeout_s: float | None = None,
        **options: Unpack[EmbedOptions],
    ) -> Any:
        """One embedding an input, in their order. Raises if any input is bad. For more than one request takes:
        ``embed_many`` and ``embed_stream``.

        ``kind``: "dense" gives float32 [N, D]; "sparse" a list of ``SparseVector``, token ids and their weights;
        "per_token" a list of float32 [L, D], a vector a token. ``options``: see ``EmbedOptions``.

            vectors = client.embed(["A cat sits on the mat.", "A dog sleeps."], dimensions=128)  # [2, 128]
        """
        request = messages.embed_request(inputs, model or self._model, {**options, "kind": kind})
        return messages.embeddings(self.calls.answer(self.embed_stub.Embed, request, timeout_s))

    def score(
        self,
        query: Text,
        items: Iterable[Text],
        labels: Sequence[str] | Sequence[int] | np.ndarray = (),
        *,
        model: str = "",
        timeout_s: float | None = None,
        **options: Unpack[ScoreOptions],
    ) -> np.ndarray:
        """float32 [items, labels]: how likely each label is as the next token after query and item.

        Without ``labels``: those of the model's own head, in the order of ``Model.labels``.
        ``options``: see ``ScoreOptions``.

            client.score("An animal? ", ["A horse:", "A spoon:"], [" yes", " no"], apply_softmax=True)  # [2, 2]
        """
        request = messages.score_request(query, items, labels, model or self._model, options)
        response = self.calls.answer(self.score_stub.Score, request, timeout_s)
        return messages.stacked(messages.each_score(response))

    def rerank(
        self,
        query: str,
        documents: Iterable[str],
        *,
        top_n: int | None = None,
        model: str = "",
        timeout_s: float | None = None,
        **options: Unpack[RerankOptions],
    ) -> list[RankedDocument]:
        """The documents by how well they answer the query, highest score first. Raises if any document is bad.

        ``top_n``: how many come back. ``options``: see ``RerankOptions``.

            best = client.rerank("a fruit", ["apple", "brick"], top_n=1)[0].index
        """
        request = ranking.rerank_request(query, documents, model or self._model, {**options, "top_n": top_n})
        return ranking.ranking(self.calls.answer(self.score_stub.Rerank, request, timeout_s))

    def classify(
        self,
        inputs: Iterable[Text | tuple[Text, Text]],
        *,
        model: str = "",
        timeout_s: float | None = None,
        **options: Unpack[ClassifyOptions],
    ) -> list[Classes]:
        """The classes of each text, or of each pair given as a tuple of two. Raises if any input is bad.

        ``options``: see ``ClassifyOptions``.

            client.classify(["What a day!"], top_k=1)  # [{"joy": 0.97}]
        """
        request = ranking.classify_request(inputs, model or self._model, options)
        return ranking.classifications(self.calls.answer(self.score_stub.Classify, request, timeout_s))

    def models(self) -> list[model_pb2.Model]:
        """The models that are ready."""
        response = self.calls.answer(self.model_stub.ListModels, model_pb2.ListModelsRequest())
        return list(response.models)

    def tokenize(
        self,
        text: str | Sequence[Mapping[str, Any]],
        *,
        model: str = "",
        special_tokens: bool | None = None,
        **options: Unpack[ChatOptions],
    ) -> model_pb2.TokenizeResponse:
        """``token_ids`` and ``pieces`` of a text, or of messages with ``generate``'s ``options`` for those."""
        request = messages.tokenize_request(text, model or self._model, special_tokens, options)
        return self.calls.answer(self.model_stub.Tokenize, request)

    def detokenize(self, token_ids: Sequence[int] | np.ndarray, *, model: str = "") -> str:
        """The text of token ids, without special tokens."""
        request = messages.detokenize_request(token_ids, model or self._model)
        return self.calls.answer(self.model_stub.Detokenize, request).text
