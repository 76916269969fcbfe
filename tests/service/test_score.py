"""Score: what is put before and behind what, labels, the packed form, errors of single items."""

from __future__ import annotations

import grpc
import numpy as np
import pytest

from pyruntime.v1 import common_pb2, score_pb2
from tests.fakes import BOS, POISON
from tests.service.conftest import Stack, failure_of, unpack

Ids = common_pb2.TokenIds
Input = common_pb2.Input


def request(*items: Input, **fields) -> score_pb2.ScoreRequest:
    return score_pb2.ScoreRequest(**{"query": Input(text="qq"), "items": items, "labels": ["y", "n"]} | fields)


async def test_texts(stack: Stack):
    answer = await stack.score.Score(request(Input(text="a"), Input(text="bc"), apply_softmax=True, temperature=0.5))
    (job,) = stack.engine.scored
    # The start's special token once, none before items.
    assert (job.prefix, job.items) == ([BOS, *b"qq"], [[*b"a"], [*b"bc"]])
    assert (job.label_ids, job.apply_softmax, job.temperature) == ([*b"yn"], True, 0.5)
    np.testing.assert_allclose(answer.results[1].scores, [1 / (3 + ord("y")), 1 / (3 + ord("n"))], rtol=1e-6)
    assert [result.prompt_tokens for result in answer.results] == [4, 5]
    assert [result.cached_tokens for result in answer.results] == [0, 3]
    assert (answer.usage.prompt_tokens, answer.usage.cached_tokens) == (9, 3)
    assert answer.model == "decoder"


async def test_item_first(stack: Stack):
    await stack.score.Score(request(Input(text="a"), Input(token_ids=Ids(ids=[7])), item_first=True))
    (job,) = stack.engine.scored
    assert (job.prefix, job.items) == ([], [[BOS, *b"aqq"], [7, *b"qq"]])


async def test_token_ids_are_used_as_they_are(stack: Stack):
    query = Input(token_ids=Ids(ids=[5, 6]))
    await stack.score.Score(request(Input(text="a"), query=query, labels=[], label_token_ids=[8, 3, 8]))
    (job,) = stack.engine.scored
    assert (job.prefix, job.items, job.label_ids) == ([5, 6], [[*b"a"]], [8, 3, 8])


async def test_packed_form_is_taken_apart(stack: Stack):
    query = Input(token_ids=Ids(ids=[1, 2, 9, 3, 9, 9, 4, 5, 9]))
    answer = await stack.score.Score(request(query=query, delimiter_token_id=9))
    (job,) = stack.engine.scored
    assert (job.prefix, job.items) == ([1, 2], [[3], [4, 5]])
    assert [result.HasField("error") for result in answer.results] == [False, True, False]
    assert unpack(answer.results[1].error).violations == {"query.token_ids": "item 1 is empty"}


async def test_packed_items_are_counted_before_they_are_taken_apart(stack: Stack, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pyruntime.service.score.read_packed_inputs", None)
    query = Input(token_ids=Ids(ids=[1] + [9] * 10))
    failure = await failure_of(stack.score.Score(request(query=query, delimiter_token_id=9)))
    assert failure.violations == {"query.token_ids": "has 9 entries; allowed: 1 to 8"}


async def test_a_query_behind_each_item_counts_before_it_is_copied(stack: Stack, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pyruntime.service.score_heads.MAX_SCORE_TOKENS", 8)
    items = [Input(text="a"), Input(text="b"), Input(text=""), Input(text="cd")]
    failure = await failure_of(stack.score.Score(request(*items, item_first=True)))
    assert failure.violations == {"items": "in all they are 10 tokens; allowed: at most 8"}


async def test_truncation_cuts_the_item(stack: Stack):
    long = Input(text="a" * 30 + "b" * 40)
    for truncation, kept in (
        (common_pb2.TRUNCATION_RIGHT, b"a" * 30 + b"b" * 31),
        (common_pb2.TRUNCATION_LEFT, b"a" * 21 + b"b" * 40),
    ):
        await stack.score.Score(request(long, truncation=truncation))
        assert stack.engine.scored[-1].items == [[*kept]]
        await stack.score.Score(request(long, truncation=truncation, item_first=True))
        assert stack.engine.scored[-1].items == [[BOS, *kept, *b"qq"]]


async def test_item_first_reserves_no_room_for_a_start_that_is_not_added(stack: Stack):
    query, one = Input(token_ids=Ids(ids=[5] * 63)), Input(token_ids=Ids(ids=[7]))
    await stack.score.Score(request(one, query=query, item_first=True))
    assert stack.engine.scored[-1].items == [[7, *[5] * 63]]
    for truncation in (common_pb2.TRUNCATION_NONE, common_pb2.TRUNCATION_LEFT):
        mixed = request(one, Input(text="a"), query=query, item_first=True, truncation=truncation)
        answer = await stack.score.Score(mixed)
        assert [result.HasField("error") for result in answer.results] == [False, True]
        assert "at most 0 beside the query" in unpack(answer.results[1].error).violations["items[1]"]
    full = Input(token_ids=Ids(ids=[5] * 64))
    failure = await failure_of(stack.score.Score(request(one, query=full, item_first=True)))
    assert "has 64 tokens; allowed: at most 63" in failure.violations["query"]


async def test_bad_items_leave_the_others(stack: Stack):
    items = [Input(text="a"), Input(text=""), Input(text="c" * 63), Input(token_ids=Ids(ids=[POISON])), Input(text="d")]
    answer = await stack.score.Score(request(*items))
    assert [result.index for result in answer.results] == [0, 1, 2, 3, 4]
    assert [result.HasField("error") for result in answer.results] == [False, True, True, True, False]
    assert [len(result.scores) for result in answer.results] == [2, 0, 0, 0, 2]
    reasons = [unpack(answer.results[i].error).reason for i in (1, 2, 3)]
    assert reasons == ["INVALID_FIELD", "INVALID_FIELD", "COMPUTE_FAULT"]


async def test_a_request_of_bad_items_fails_whole(stack: Stack):
    failure = await failure_of(stack.score.Score(request(Input(text=""), Input())))
    assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
    assert set(failure.violations) == {"items[0].text", "items[1]"}
