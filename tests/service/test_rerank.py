"""Rerank over a real channel and fake engines: what each way asks of the engine, order, limits, errors of documents."""

from __future__ import annotations

import asyncio

import grpc
import numpy as np
import pytest

from pyruntime.service import late_interaction
from pyruntime.service.late_interaction import groups, max_sim
from pyruntime.types import EmbeddingKind, QueryExpansion
from pyruntime.v1 import common_pb2, model_pb2, score_pb2
from tests.fakes import BOS, EOS, POISON, vector_of
from tests.service.conftest import Stack, failure_of, unpack
from tests.service.rankers import classifier, late_interaction_ranker, serve, template_ranker

NUL = chr(POISON)  # a text whose scores are not finite
WAYS = ["cross", "prompt", "late"]


def request(model: str, *documents: str, **fields) -> score_pb2.RerankRequest:
    return score_pb2.RerankRequest(**{"model": model, "query": "qq", "documents": documents} | fields)


@pytest.fixture
async def ranking(stack: Stack) -> Stack:
    serve(stack, classifier("cross", "relevant"), template_ranker("prompt"), late_interaction_ranker("late"))
    return stack


def engine(stack: Stack, name: str):
    return stack.registry.resolve(name, None).engine


def pair(document: bytes) -> list[int]:
    return [BOS, *b"qq", EOS, *document, EOS]


def sigmoid(value: float) -> float:
    return 1 / (1 + np.exp(-float(value)))


async def test_a_classifier_reads_pairs(ranking: Stack):
    answer = await ranking.score.Rerank(request("cross", "a", "bc", "d", priority=3, request_id="r"))
    (job,) = engine(ranking, "cross").classified
    assert job.inputs == [pair(b"a"), pair(b"bc"), pair(b"d")]
    assert job.token_type_ids == [[0] * 4 + [1] * (n + 1) for n in (1, 2, 1)]
    assert (job.raw, job.priority, job.request_id, job.prefix) == (False, 3, "r", [])
    expected = {index: sigmoid(vector_of(ids, 1)[0]) for index, ids in enumerate(job.inputs)}
    assert [each.index for each in answer.results] == sorted(expected, key=expected.__getitem__, reverse=True)
    for each in answer.results:
        assert each.score == pytest.approx(expected[each.index], rel=1e-6)
        assert not each.HasField("document")
    assert (answer.model, answer.usage.prompt_tokens, answer.usage.cached_tokens) == ("cross", 6 + 7 + 6, 0)

    raw = await ranking.score.Rerank(request("cross", "a", raw_scores=True))
    assert raw.results[0].score == vector_of(pair(b"a"), 1)[0]


async def test_a_template_is_put_around_query_and_document(ranking: Stack):
    answer = await ranking.score.Rerank(request("prompt", "a", "bc", raw_scores=True))
    (job,) = engine(ranking, "prompt").scored
    assert (job.prefix, job.items) == ([BOS, *b"S\nfind|qq\n"], [[*b"D: a E"], [*b"D: bc E"]])
    assert (job.label_ids, job.raw) == ([*b"yn"], True)

    def logits(item: list[int]) -> float:
        return 1 / (1 + len(item) + ord("y")) - 1 / (1 + len(item) + ord("n"))

    expected = {index: logits(item) for index, item in enumerate(job.items)}
    assert [each.index for each in answer.results] == sorted(expected, key=expected.__getitem__, reverse=True)
    for each in answer.results:
        assert each.score == pytest.approx(expected[each.index], rel=1e-6)
    assert answer.usage.cached_tokens == len(job.prefix)

    scored = await ranking.score.Rerank(request("prompt", "a", instruction="{query} at"))
    assert engine(ranking, "prompt").scored[-1].prefix == [BOS, *b"S\n{query} at|qq\n"]
    assert scored.results[0].score == pytest.approx(sigmoid(logits(job.items[0])), rel=1e-6)


async def test_vectors_are_compared_by_max_sim(ranking: Stack, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(late_interaction, "GROUP_BYTES", 400)
    answer = await ranking.score.Rerank(request("late", "abc", "d", "efgh" * 9, "i"))
    jobs = engine(ranking, "late").embedded
    documents = [[BOS, *b"!", *text] for text in (b"abc", b"d", b"efgh" * 9, b"i")]
    assert [job.inputs for job in jobs] == [[[BOS, *b"?qq"]], documents[:2], documents[2:3], documents[3:]]
    assert {(job.kind, job.dimensions, job.normalize) for job in jobs} == {(EmbeddingKind.PER_TOKEN, 5, True)}
    query = vectors([BOS, *b"?qq"])
    expected = [sum(max(row @ other for other in vectors(ids)) for row in query) for ids in documents]
    assert [each.index for each in answer.results] == sorted(range(4), key=lambda index: -expected[index])
    for each in answer.results:
        assert each.score == pytest.approx(expected[each.index], rel=1e-5)
    assert answer.usage.prompt_tokens == sum(map(len, documents))


def vectors(ids: list[int]) -> np.ndarray:
    return np.stack([vector_of(ids[: place + 1], 5) for place in range(len(ids))]).astype(np.float64)


def test_max_sim_and_its_groups(monkeypatch: pytest.MonkeyPatch):
    generator = np.random.default_rng(4)
    query, document = (generator.standard_normal((rows, 16)).astype(np.float32) for rows in (32, 500))
    exact = (query.astype(np.float64) @ document.astype(np.float64).T).max(axis=1).sum()
    assert max_sim(query, document) == pytest.approx(exact, rel=1e-6)
    assert not np.isfinite(max_sim(query * np.float32(1e30), document * np.float32(1e30)))
    monkeypatch.setattr(late_interaction, "GROUP_BYTES", 4 * 500 * 5)
    assert max_sim(query, document) == pytest.approx(exact, rel=1e-6)
    monkeypatch.setattr(late_interaction, "GROUP_BYTES", 4 * 10 * 18)
    parts = list(groups([[1] * n for n in (4, 6, 1, 20, 3)], 2, 16))
    assert [[len(ids) for ids in part] for part in parts] == [[4, 6], [1], [20], [3]]
    assert list(groups([], 2, 16)) == []


@pytest.mark.parametrize("model", WAYS)
async def test_ties_by_index_and_duplicates_once(ranking: Stack, model: str):
    answer = await ranking.score.Rerank(request(model, "b", "a", "b", "a", "b", return_documents=True))
    order = [each.index for each in answer.results]
    assert order in ([[0, 1, 2, 3, 4]] if model == "prompt" else [[0, 2, 4, 1, 3], [1, 3, 0, 2, 4]])
    assert [each.document for each in answer.results] == ["babab"[index] for index in order]
    fake = engine(ranking, model)
    asked = [*fake.classified, *fake.scored, *fake.embedded][-1]
    assert len(asked.inputs if model != "prompt" else asked.items) == 2
    each = answer.usage.prompt_tokens // 5
    assert (answer.usage.prompt_tokens, answer.usage.cached_tokens >= 3 * each) == (5 * each, True)


@pytest.mark.parametrize("model", WAYS)
async def test_top_n_and_bad_documents(ranking: Stack, model: str):
    documents = ["a", "", "b", " \n", NUL, "c" * 90]
    answer = await ranking.score.Rerank(request(model, *documents, top_n=100))
    assert sorted(each.index for each in answer.results) == [0, 2]
    assert [each.index for each in answer.errors] == [1, 3, 4, 5]
    failures = [unpack(each.error) for each in answer.errors]
    assert [each.reason for each in failures] == ["INVALID_FIELD", "INVALID_FIELD", "COMPUTE_FAULT", "INVALID_FIELD"]
    assert list(failures[0].violations) == ["documents[1]"] and "is empty" in failures[0].violations["documents[1]"]
    assert "unless truncation is set" in failures[3].violations["documents[5]"]
    one = await ranking.score.Rerank(request(model, *documents, top_n=1))
    assert [each.index for each in one.results] == [answer.results[0].index]
    assert one.usage == answer.usage


@pytest.mark.parametrize(("model", "kept"), [("cross", 59), ("prompt", 64), ("late", 62)])
async def test_the_document_is_cut_to_what_the_query_leaves(ranking: Stack, model: str, kept: int):
    text = "a" * 40 + "b" * 40

    async def read(**fields) -> bytes:
        await ranking.score.Rerank(request(model, text, **fields))
        fake = engine(ranking, model)
        ids = {"cross": lambda: fake.classified[-1].inputs[0], "late": lambda: fake.embedded[-1].inputs[0]}
        found = fake.scored[-1].items[0] if model == "prompt" else ids[model]()
        return bytes(each for each in found if each < BOS and each in b"ab")

    right, left = common_pb2.TRUNCATION_RIGHT, common_pb2.TRUNCATION_LEFT
    assert await read(truncation=right) == text.encode()[:kept]
    space = model == "prompt"  # which its template puts before the document: here a token of its own, cut on the left
    assert await read(truncation=left) == text.encode()[-kept - space :]
    assert await read(truncation=right, max_tokens_per_document=7 + space) == b"a" * 7
    assert await read(truncation=left, max_tokens_per_document=7) == b"b" * 7
    failure = await failure_of(ranking.score.Rerank(request(model, "a" * 20, max_tokens_per_document=7)))
    assert "has" in failure.violations["documents[0]"]


async def test_a_template_stays_whole_when_the_document_is_cut(ranking: Stack):
    long = request("prompt", "a" * 90, truncation=common_pb2.TRUNCATION_LEFT, max_tokens_per_document=3)
    await ranking.score.Rerank(long)
    assert engine(ranking, "prompt").scored[-1].items == [[*b"D:aaa E"]]


@pytest.mark.parametrize("model", WAYS)
async def test_a_query_without_room_is_refused(ranking: Stack, model: str):
    failure = await failure_of(ranking.score.Rerank(request(model, "a", "b", query="q" * 79)))
    assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
    assert "allowed: at most" in failure.violations["query"]


BAD = [
    (request("cross", "a", query=""), "query", "is empty"),
    (request("cross", "a", query=" \t"), "query", "is blank"),
    (request("cross"), "documents", "has 0 entries; allowed: 1 to 8"),
    (request("cross", *"a" * 9), "documents", "has 9 entries"),
    (request("cross", "a", top_n=0), "top_n", "0 is out of range; allowed: 1 to"),
    (request("cross", "a", max_tokens_per_document=0), "max_tokens_per_document", "0 is out of range"),
    (request("cross", "a", truncation=9), "truncation", "9"),
    (request("cross", "a", instruction="i"), "instruction", "'cross' takes none"),
    (request("late", "a", instruction="i"), "instruction", "'late' takes none"),
    (request("prompt", "a", instruction=" "), "instruction", "is blank"),
    (request("cross", "a", request_id="x" * 257), "request_id", "257"),
    (request("cross", *["a" * 900] * 4), "documents", "bytes of text in all"),
    (request("cross", "", ""), "documents[0]", "is empty"),
    (request("cross", "a <extra>"), "documents[0]", "<extra>"),
    (request("late", "a", query="<extra>"), "query", "<extra>"),
]


@pytest.mark.parametrize(("bad", "field", "problem"), BAD)
async def test_bad_fields_are_named(ranking: Stack, bad, field: str, problem: str):
    failure = await failure_of(ranking.score.Rerank(bad))
    assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
    assert problem in failure.violations[field]


async def test_models_that_cannot(ranking: Stack):
    failure = await failure_of(ranking.score.Rerank(request("decoder", "a")))
    assert (failure.code, failure.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "CAPABILITY_MISSING")
    failure = await failure_of(ranking.score.Rerank(request("", "a")))
    assert "several models can RERANK: cross, late, prompt" in failure.violations["model"]


async def test_a_query_whose_vectors_are_not_finite_leaves_nothing_to_compare(ranking: Stack):
    failure = await failure_of(ranking.score.Rerank(request("late", "a", query=f"q{NUL}")))
    assert failure.code is grpc.StatusCode.INTERNAL


@pytest.mark.parametrize("model", ["cross", "prompt"])
async def test_the_tokens_of_a_request_are_bounded(ranking: Stack, monkeypatch: pytest.MonkeyPatch, model: str):
    monkeypatch.setattr("pyruntime.service.score_heads.MAX_SCORE_TOKENS", 20)
    failure = await failure_of(ranking.score.Rerank(request(model, *"abcdefgh")))
    assert "tokens; allowed: at most 20" in failure.violations["documents"]


async def test_scores_near_one_keep_their_order(ranking: Stack, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tests.fakes.vector_of", lambda ids, _: np.array([8 + len(ids) / 16], np.float32))
    answer = await ranking.score.Rerank(request("cross", *("x" * n for n in (3, 1, 2, 5, 4))))
    assert [each.index for each in answer.results] == [3, 4, 0, 2, 1]
    assert all(0.9996 < each.score < 1 for each in answer.results)


@pytest.mark.parametrize("model", WAYS)
async def test_a_place_is_held_until_the_call_ends(ranking: Stack, model: str):
    fake = engine(ranking, model)
    fake.block = True
    call = ranking.score.Rerank(request(model, "a"))
    await asyncio.wait_for(fake.blocked.wait(), 5)
    assert fake.admission.num_open == 1
    call.cancel()
    await asyncio.wait_for(fake.unblocked.wait(), 5)
    fake.block = False
    await ranking.score.Rerank(request(model, "a"))
    assert fake.admission.num_open == 0
    fake.admission._max_requests = 0
    failure = await failure_of(ranking.score.Rerank(request(model, "a")))
    assert failure.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert failure.retry_s is not None


@pytest.mark.parametrize(("query", "ids"), [("qq", b"?qq"), ("q" * 20, b"?qqqqqqqq")])
async def test_a_query_is_lengthened_and_cut_as_its_model_says(ranking: Stack, query: str, ids: bytes):
    expansion = QueryExpansion(token_id=7, length=10, cut_to=10, attended=True)
    model = late_interaction_ranker("longer", query_expansion=expansion)
    serve(ranking, model)
    await ranking.score.Rerank(request("longer", "a", query=query))
    asked, document = engine(ranking, "longer").embedded
    assert asked.inputs == [[BOS, *ids, *[7] * (9 - len(ids))]]
    assert (asked.as_query, document.as_query) == (True, False)


async def test_tokenize_shows_what_runs(ranking: Stack):
    async def shown(model: str, **fields) -> list[int]:
        text = model_pb2.RerankText(**{"query": "qq", "document": "a"} | fields)
        return list((await ranking.models.Tokenize(model_pb2.TokenizeRequest(model=model, rerank=text))).token_ids)

    assert await shown("cross") == pair(b"a")
    assert await shown("prompt", instruction="i") == [BOS, *b"S\ni|qq\nD: a E"]
    assert await shown("late") == [BOS, *b"?qq", BOS, *b"!a"]
    both = [common_pb2.Input(text="x"), common_pb2.Input(token_ids=common_pb2.TokenIds(ids=[7]))]
    two = model_pb2.TokenizeRequest(model="cross", pair=common_pb2.InputPair(first=both[0], second=both[1]))
    assert list((await ranking.models.Tokenize(two)).token_ids) == [BOS, *b"x", EOS, 7, EOS]


TOKENIZE = model_pb2.TokenizeRequest
BAD_TOKENIZE = [
    (TOKENIZE(model="cross", rerank={"query": "", "document": "a"}), "rerank.query", "is empty"),
    (TOKENIZE(model="cross", rerank={"query": "a", "document": " "}), "rerank.document", "is blank"),
    (TOKENIZE(model="cross", rerank={"query": "a", "document": "a", "instruction": "i"}), "rerank.instruction", "none"),
    (TOKENIZE(model="cross", rerank={"query": "a", "document": "a"}, special_tokens=True), "special_tokens", "unset"),
    (TOKENIZE(model="cross", pair={"first": {"text": "a"}}), "pair.second", "neither"),
    (TOKENIZE(model="decoder", pair={"first": {"text": "a"}, "second": {"text": "a"}}), "pair", "knows no pairs"),
]


@pytest.mark.parametrize(("bad", "field", "problem"), BAD_TOKENIZE)
async def test_bad_pairs_to_tokenize_are_named(ranking: Stack, bad, field: str, problem: str):
    failure = await failure_of(ranking.models.Tokenize(bad))
    assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
    assert problem in failure.violations[field]
