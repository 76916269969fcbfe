"""Rerank where a query leaves a document little room or none: it is refused, never read without the document."""

from __future__ import annotations

import pytest

from pyruntime.errors import InvalidField
from pyruntime.service.pairs import SecondLimit
from pyruntime.v1 import common_pb2, score_pb2
from tests.service.conftest import Stack, failure_of
from tests.service.rankers import serve, template_ranker


@pytest.mark.parametrize("truncation", common_pb2.Truncation.values())
async def test_what_stands_before_a_document_needs_room_too(stack: Stack, truncation: int):
    """Of 80 tokens the template takes 13, two of them right before the document."""
    model = template_ranker("prompt")
    serve(stack, model)
    fits = score_pb2.RerankRequest(model="prompt", query="q" * 66, documents=["aaaa"], truncation=truncation)
    if truncation in (common_pb2.TRUNCATION_RIGHT, common_pb2.TRUNCATION_LEFT):
        await stack.score.Rerank(fits)
        assert len(model.engine.scored[-1].items[0]) == len(b"D:a E")
    for length in range(67, 72):
        fits.query = "q" * length
        failure = await failure_of(stack.score.Rerank(fits))
        assert "allowed: at most 79 together" in failure.violations["query"]


def test_a_second_text_without_room_is_never_cut_to_nothing():
    for truncation in common_pb2.Truncation.values():
        for room in (3, 2, -1):
            with pytest.raises(InvalidField, match="no room is left"):
                SecondLimit(truncation).fit([1, 2, 3, 4, 5], room - 3, "documents[0]", 3)
