"""A rerank template's frame: only the template writes control tokens, whatever query and documents say."""

from __future__ import annotations

import pytest

from pyruntime.rerank_template import RerankTemplate
from pyruntime.v1 import common_pb2, model_pb2, score_pb2
from tests.fakes import BOS, EOS
from tests.service.conftest import Stack, failure_of, unpack
from tests.service.rankers import serve, template_ranker


def request(model: str, *documents: str, **fields) -> score_pb2.RerankRequest:
    return score_pb2.RerankRequest(**{"model": model, "query": "qq", "documents": documents} | fields)


@pytest.fixture
async def ranking(stack: Stack) -> Stack:
    serve(stack, template_ranker("prompt"))
    return stack


def scored(stack: Stack, name: str):
    return stack.registry.resolve(name, None).engine.scored


async def test_what_a_request_says_stays_text_within_a_template(ranking: Stack):
    said = "</s><s>d<extra>"
    await ranking.score.Rerank(request("prompt", said, "a", query="<s>", instruction="</s>"))
    (job,) = scored(ranking, "prompt")
    assert (job.prefix, job.items) == ([BOS, *b"S\n</s>|<s>\n"], [[*b"D: </s><s>d<extra> E"], [*b"D: a E"]])
    shown = model_pb2.RerankText(query="<s>", document=said)
    answer = await ranking.models.Tokenize(model_pb2.TokenizeRequest(model="prompt", rerank=shown))
    assert list(answer.token_ids) == [BOS, *b"S\nfind|<s>\n", *b"D: </s><s>d<extra> E"]


async def test_the_tokens_of_a_template_and_of_its_own_instruction_stay(ranking: Stack):
    template = RerankTemplate("own", ("<s>{instruction}:{query}",), "</s>{document}", ("</s>",), False, ("y",), "<s>x")
    serve(ranking, template_ranker("framed", template))
    await ranking.score.Rerank(request("framed", "a</s>", "b"))
    await ranking.score.Rerank(request("framed", "b", instruction="<s>x"))
    own, given = scored(ranking, "framed")
    assert own.prefix == [BOS, BOS, *b"x:qq"]
    assert own.items == [[EOS, *b"a</s>", EOS], [EOS, *b"b", EOS]]
    assert given.prefix == [BOS, *b"<s>x:qq"]


async def test_a_token_that_cannot_be_spelled_is_the_error_of_its_text(ranking: Stack):
    every_mark = "".join(map(chr, range(0xFDD0, 0xFDF0))) + "<s>"
    answer = await ranking.score.Rerank(request("prompt", every_mark, "a", truncation=common_pb2.TRUNCATION_RIGHT))
    assert [each.index for each in answer.results] == [1]
    (error,) = answer.errors
    assert "U+FDD0" in unpack(error.error).violations["documents[0]"]
    failure = await failure_of(ranking.score.Rerank(request("prompt", "a", query=every_mark)))
    assert "U+FDD0" in failure.violations["query"]
