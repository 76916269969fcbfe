"""Classify, and Score on the head of a decoder, over a real channel and fake engines."""

from __future__ import annotations

import grpc
import numpy as np
import pytest

from pyruntime.types import Capability
from pyruntime.v1 import common_pb2, score_pb2
from tests.fakes import BOS, EOS, POISON, fake_model, vector_of
from tests.service.conftest import Stack, failure_of, unpack
from tests.service.rankers import classifier, serve

Input = common_pb2.Input
LABELS = ("bad", "fair", "good")
RIGHT, LEFT = common_pb2.TRUNCATION_RIGHT, common_pb2.TRUNCATION_LEFT


def ids(*values: int) -> Input:
    return Input(token_ids=common_pb2.TokenIds(ids=values))


def texts(*inputs: str | Input, **fields) -> score_pb2.ClassifyRequest:
    given = [each if isinstance(each, Input) else Input(text=each) for each in inputs]
    return score_pb2.ClassifyRequest(**{"model": "mood", "inputs": given} | fields)


def pairs(*both: tuple[str | Input, str | Input], **fields) -> score_pb2.ClassifyRequest:
    sides = [[each if isinstance(each, Input) else Input(text=each) for each in pair] for pair in both]
    given = [common_pb2.InputPair(first=first, second=second) for first, second in sides]
    return score_pb2.ClassifyRequest(**{"model": "mood", "pairs": given} | fields)


@pytest.fixture
async def mood(stack: Stack) -> Stack:
    head = fake_model("head", {Capability.CLASSIFY, Capability.SCORE}, labels=LABELS)
    serve(stack, classifier("mood", *LABELS), classifier("names", "O", "B", classifies_tokens=True), head)
    return stack


def engine(stack: Stack, name: str = "mood"):
    return stack.registry.resolve(name, None).engine


async def test_texts_with_all_labels_highest_first(mood: Stack):
    answer = await mood.score.Classify(texts("a", ids(5, 6), "a", priority=-2, request_id="r"))
    (job,) = engine(mood).classified
    assert (job.inputs, job.token_type_ids, job.raw) == ([[BOS, *b"a", EOS], [5, 6]], None, False)
    assert (job.priority, job.request_id) == (-2, "r")
    for result, sequence in zip(answer.results, [job.inputs[0], job.inputs[1], job.inputs[0]], strict=True):
        expected = dict(zip(LABELS, 1 / (1 + np.exp(-vector_of(sequence, 3))), strict=True))
        order = sorted(expected, key=expected.__getitem__, reverse=True)
        assert [each.label for each in result.scores] == order
        np.testing.assert_array_equal([each.score for each in result.scores], [expected[label] for label in order])
        assert result.prompt_tokens == len(sequence)
    assert [result.index for result in answer.results] == [0, 1, 2]
    assert (answer.model, answer.usage.prompt_tokens, answer.usage.cached_tokens) == ("mood", 8, 3)


async def test_raw_scores_and_top_k(mood: Stack):
    answer = await mood.score.Classify(texts("a", raw_scores=True, top_k=2))
    logits = vector_of([BOS, *b"a", EOS], 3)
    assert [each.score for each in answer.results[0].scores] == sorted(logits.tolist(), reverse=True)[:2]
    assert engine(mood).classified[-1].raw
    assert len((await mood.score.Classify(texts("a", top_k=9))).results[0].scores) == 3


async def test_equal_labels_stay_in_the_heads_order(mood: Stack, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tests.fakes.vector_of", lambda *_: np.array([0.5, 2, 0.5], np.float32))
    answer = await mood.score.Classify(texts("a"))
    assert [each.label for each in answer.results[0].scores] == ["fair", "bad", "good"]


async def test_pairs(mood: Stack):
    await mood.score.Classify(pairs(("a", "bc"), ("a", ids(7)), ("ab", "c"), ("a", "bc")))
    (job,) = engine(mood).classified
    assert job.inputs == [[BOS, *b"a", EOS, *b"bc", EOS], [BOS, *b"a", EOS, 7, EOS], [BOS, *b"ab", EOS, *b"c", EOS]]
    assert job.token_type_ids == [[0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1], [0, 0, 0, 0, 1, 1]]


async def test_a_pairs_second_text_is_cut_and_the_first_never(mood: Stack):
    long = "b" * 30 + "c" * 40
    for truncation, kept in ((RIGHT, long[:60]), (LEFT, long[-60:])):
        await mood.score.Classify(pairs(("a", long), truncation=truncation))
        assert engine(mood).classified[-1].inputs == [[BOS, *b"a", EOS, *kept.encode(), EOS]]
    answer = await mood.score.Classify(pairs(("a", "b"), ("a", long)))
    assert "has 70 tokens; allowed: at most 60 here" in unpack(answer.results[1].error).violations["pairs[1].second"]
    answer = await mood.score.Classify(pairs(("a", "b"), ("x" * 61, "b"), truncation=RIGHT))
    problem = unpack(answer.results[1].error).violations["pairs[1].first"]
    assert problem.startswith("has 61 tokens; allowed: at most 60 beside 3 special tokens in a context of 64")
    await mood.score.Classify(pairs(("x" * 60, "bb"), truncation=RIGHT))
    assert engine(mood).classified[-1].inputs == [[BOS, *b"x" * 60, EOS, *b"b", EOS]]


async def test_a_long_text_is_cut_between_its_special_tokens(mood: Stack):
    await mood.score.Classify(texts("a" * 50 + "b" * 50, truncation=LEFT))
    assert engine(mood).classified[-1].inputs == [[BOS, *b"a" * 12, *b"b" * 50, EOS]]


async def test_bad_inputs_leave_the_others(mood: Stack):
    answer = await mood.score.Classify(texts("a", "", ids(POISON), "b" * 63, ids(300), Input(), "c"))
    assert [result.HasField("error") for result in answer.results] == [False, True, True, True, True, True, False]
    failures = [unpack(result.error) for result in answer.results[1:6]]
    reasons = ["INVALID_FIELD", "COMPUTE_FAULT", "INVALID_FIELD", "INVALID_FIELD", "INVALID_FIELD"]
    assert [each.reason for each in failures] == reasons
    assert set(failures[2].violations) == {"inputs[3]"}
    assert [len(result.scores) for result in answer.results] == [3, 0, 0, 0, 0, 0, 3]
    assert answer.usage.prompt_tokens == 6


async def test_token_classifiers_answer_for_each_token(mood: Stack):
    answer = await mood.score.Classify(texts("ab", model="names", raw_scores=True, top_k=1))
    (result,) = answer.results
    assert not result.scores
    assert [each.token_id for each in result.tokens] == [BOS, *b"ab", EOS]
    assert [each.piece for each in result.tokens] == ["<s>", "a", "b", "</s>"]
    for place, token in enumerate(result.tokens):
        logits = vector_of([BOS, *b"ab", EOS][: place + 1], 2)
        assert [(each.label, each.score) for each in token.scores] == [("OB"[logits.argmax()], logits.max())]


BAD = [
    (texts(), "inputs", "exactly one of inputs and pairs"),
    (texts("a", pairs=[{"first": {"text": "a"}, "second": {"text": "a"}}]), "inputs", "exactly one of"),
    (texts(*"a" * 9), "inputs", "has 9 entries; allowed: 1 to 8"),
    (pairs(*[("a", "b")] * 9), "pairs", "has 9 entries"),
    (texts("a", top_k=0), "top_k", "0 is out of range"),
    (texts("a", truncation=9), "truncation", "9"),
    (texts("a", request_id="x" * 257), "request_id", "257"),
    (pairs(*[("a" * 900, "b" * 900)] * 2), "pairs", "bytes of text in all"),
    (texts("", " "), "inputs[0].text", "is empty"),
    (pairs(("", "a")), "pairs[0].first.text", "is empty"),
    (pairs(("a", Input())), "pairs[0].second", "neither"),
    (pairs(("a", ids(300))), "pairs[0].second.token_ids.ids[0]", "vocabulary"),
    (pairs(("a", "b"), model="head"), "pairs", "knows no pairs"),
]


@pytest.mark.parametrize(("bad", "field", "problem"), BAD)
async def test_bad_fields_are_named(mood: Stack, bad, field: str, problem: str):
    failure = await failure_of(mood.score.Classify(bad))
    assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
    assert problem in failure.violations[field]


async def test_a_model_without_a_classifier(mood: Stack):
    failure = await failure_of(mood.score.Classify(texts("a", model="decoder")))
    assert (failure.code, failure.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "CAPABILITY_MISSING")


def score(*items: Input, **fields) -> score_pb2.ScoreRequest:
    return score_pb2.ScoreRequest(**{"model": "head", "query": Input(text="qq"), "items": items} | fields)


async def test_score_gives_a_heads_output_for_each_item(mood: Stack):
    answer = await mood.score.Score(score(Input(text="a"), Input(text=""), Input(text="a"), ids(POISON)))
    (job,) = engine(mood, "head").classified
    assert (job.prefix, job.inputs, job.raw) == ([BOS, *b"qq"], [[*b"a"], [POISON]], True)
    assert [result.HasField("error") for result in answer.results] == [False, True, False, True]
    np.testing.assert_array_equal(answer.results[0].scores, vector_of([BOS, *b"qqa"], 3))
    assert answer.results[2].scores == answer.results[0].scores


@pytest.mark.parametrize("temperature", [1.0, 0.25, 1e-40])
async def test_softmax_over_a_heads_labels(mood: Stack, temperature: float):
    answer = await mood.score.Score(score(Input(text="a"), apply_softmax=True, temperature=temperature))
    logits = vector_of([BOS, *b"qqa"], 3).astype(np.float64)
    powers = np.exp((logits - logits.max()) / max(temperature, 1e-38))
    np.testing.assert_allclose(answer.results[0].scores, powers / powers.sum(), rtol=1e-6, atol=1e-30)


async def test_the_other_forms_of_score_on_a_head(mood: Stack):
    await mood.score.Score(score(Input(text="a"), item_first=True))
    job = engine(mood, "head").classified[-1]
    assert (job.prefix, job.inputs) == ([], [[BOS, *b"aqq"]])
    answer = await mood.score.Score(score(query=ids(1, 2, 9, 3, 9, 4, 5, 9), delimiter_token_id=9))
    job = engine(mood, "head").classified[-1]
    assert (job.prefix, job.inputs) == ([1, 2], [[3], [4, 5]])
    np.testing.assert_array_equal(answer.results[1].scores, vector_of([1, 2, 4, 5], 3))


@pytest.mark.parametrize(
    ("fields", "field"), [({"labels": ["y"]}, "labels"), ({"label_token_ids": [1]}, "label_token_ids")]
)
async def test_labels_are_not_for_a_head_that_has_its_own(mood: Stack, fields: dict, field: str):
    failure = await failure_of(mood.score.Score(score(Input(text="a"), **fields)))
    assert "must be absent: model 'head' has labels of its own" in failure.violations[field]
    failure = await failure_of(mood.score.Score(score(*[Input(text="a")] * 7)))
    assert "7 items x 3 labels are 21 scores; allowed: at most 20" in failure.violations["items"]
