"""Rerank and Classify from Python values, and their answers turned back; shared by both clients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any, NamedTuple, TypeAlias

from pyruntime.client.errors import ApiError
from pyruntime.client.fields import fill
from pyruntime.client.messages import Text, good, several, to_input, to_inputs
from pyruntime.v1 import score_pb2


@dataclass(frozen=True, slots=True)
class RankedDocument:
    """Which document of the request, its score, and its text where ``return_documents`` asked for it."""

    index: int
    score: float
    document: str | None = None


class ClassifiedToken(NamedTuple):
    """A token and its labels' scores, highest first."""

    token_id: int
    piece: str
    scores: dict[str, float]


Classes: TypeAlias = dict[str, float] | list[ClassifiedToken]
"""Scores by label, highest first; of a model that classifies tokens, an entry a token."""


def rerank_request(
    query: str, documents: Iterable[str], model: str, options: Mapping[str, Any]
) -> score_pb2.RerankRequest:
    request = score_pb2.RerankRequest()
    fill(request, {"model": model, "query": query, "documents": several(documents, "documents"), **options})
    return request


def each_document(response: score_pb2.RerankResponse) -> list[RankedDocument | ApiError]:
    """Those that could be scored, in the order of the response, then what is wrong with the others."""
    ranked: list[RankedDocument | ApiError] = [
        RankedDocument(each.index, each.score, each.document if each.HasField("document") else None)
        for each in response.results
    ]
    return ranked + [ApiError.from_status(each.error) for each in response.errors]


def ranking(response: score_pb2.RerankResponse) -> list[RankedDocument]:
    """Highest score first. Raises the first document's error if there is one."""
    return good(each_document(response))


def classify_request(inputs: Iterable[Any], model: str, options: Mapping[str, Any]) -> score_pb2.ClassifyRequest:
    """``inputs``: texts or token ids, or tuples of two of these. Raises TypeError when both kinds are there."""
    entries = several(inputs, "inputs")
    request = score_pb2.ClassifyRequest()
    fill(request, {"model": model, **options})
    pairs = [entry for entry in entries if _is_pair(entry)]
    if pairs and len(pairs) < len(entries):
        raise TypeError("inputs must be all texts or all pairs")
    for place, (first, second) in enumerate(pairs):
        made = request.pairs.add()
        made.first.CopyFrom(to_input(first, f"pairs[{place}].first"))
        made.second.CopyFrom(to_input(second, f"pairs[{place}].second"))
    if not pairs:
        request.inputs.extend(to_inputs(entries, "inputs"))
    return request


def each_classes(response: score_pb2.ClassifyResponse) -> list[Classes | ApiError]:
    """Each input's classes, or what is wrong with it."""
    return [_classes(result) for result in response.results]


def classifications(response: score_pb2.ClassifyResponse) -> list[Classes]:
    """Each input's classes. Raises the first input's error if there is one."""
    return good(each_classes(response))


def _classes(result: score_pb2.Classification) -> Classes | ApiError:
    if result.HasField("error"):
        return ApiError.from_status(result.error)
    if result.tokens:
        return [ClassifiedToken(each.token_id, each.piece, _scores(each.scores)) for each in result.tokens]
    return _scores(result.scores)


def _scores(labels: Iterable[score_pb2.LabelScore]) -> dict[str, float]:
    return {each.label: each.score for each in labels}


def _is_pair(entry: Text | tuple[Text, Text]) -> bool:
    """Two token ids in a tuple are one text."""
    return isinstance(entry, tuple) and len(entry) == 2 and not any(isinstance(each, Integral) for each in entry)
