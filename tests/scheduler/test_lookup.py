"""The index over a sequence's own tokens, against a search of all of them."""

import random

import pytest

from pyruntime.scheduler import lookup
from pyruntime.scheduler.lookup import MAX_MATCH, MIN_MATCH, Lookup, following
from pyruntime.scheduler.tokens import SharedTokens


def found(token_ids):
    index = Lookup()
    index.read(token_ids, 10**6)
    return index.find(token_ids)


def num_equal(token_ids, place):
    count = 0
    while count < min(place, MAX_MATCH) and token_ids[place - 1 - count] == token_ids[-1 - count]:
        count += 1
    return count


def longest(token_ids):
    """The latest of the places behind most tokens that equal the newest ones."""
    counts = [(num_equal(token_ids, place), place) for place in range(MIN_MATCH, len(token_ids))]
    count, place = max(counts, default=(0, 0))
    return (place, count) if count >= MIN_MATCH else (0, 0)


@pytest.mark.parametrize(
    ("token_ids", "expected"),
    [
        ([], (0, 0)),
        ([1, 2], (0, 0)),
        ([1, 2, 3], (0, 0)),
        ([1, 2, 3, 1, 2, 3], (3, 3)),
        ([0, 0, 0], (0, 0)),  # nothing comes before the beginning, whatever an empty key looks like
        ([0, 0, 0, 0], (3, 3)),
        ([9, 1, 2, 3, 4, 8, 1, 2, 3, 5, 9, 1, 2, 3], (4, 4)),  # the longer match, not the later one
        ([1, 2, 3, 4, 1, 2, 3, 5, 6, 1, 2, 3], (7, 3)),  # the later one of equal length
        ([2**20, 0, 1, 7, 0, 0, 1], (0, 0)),  # ids that are too large for a key of their own are still compared
    ],
)
def test_places(token_ids, expected):
    assert found(token_ids) == expected


def test_random_texts_against_a_search_of_everything(monkeypatch):
    monkeypatch.setattr(lookup, "MAX_PLACES", 10**6)
    draw = random.Random(1)
    num_found = 0
    for _ in range(300):
        token_ids = [draw.randrange(3) for _ in range(draw.randrange(60))]
        if draw.random() < 0.5:
            token_ids += token_ids[draw.randrange(len(token_ids) + 1) :]
        assert found(token_ids) == longest(token_ids)
        num_found += bool(found(token_ids)[1])
    assert num_found > 100


def test_tokens_that_come_one_by_one_are_found_as_if_they_had_come_together():
    draw, index, token_ids = random.Random(2), Lookup(), []
    for _ in range(400):
        token_ids += [draw.randrange(4) for _ in range(draw.randrange(1, 4))]
        index.read(token_ids, 10)
        assert index.find(token_ids) == found(token_ids)


def test_a_prefix_that_is_shared_reads_like_any_other():
    prefix, own = [1, 2, 3, 4, 5, 6], [7, 2, 3, 4]
    assert found(SharedTokens(prefix, own)) == found(prefix + own) == (4, 3)
    assert following(SharedTokens(prefix, own), 4, 4) == [5, 6, 7, 2]


def test_a_long_prompt_is_read_in_several_calls():
    token_ids, index = [*range(20), *range(4)], Lookup()
    read = [(index.read(token_ids, 10), index.find(token_ids)) for _ in range(4)]
    assert read == [(10, (0, 0)), (10, (0, 0)), (4, (4, 4)), (0, (4, 4))]


def test_what_the_index_holds_is_bounded_and_the_latest_stays(monkeypatch):
    monkeypatch.setattr(lookup, "MAX_KEYS", 50)
    for place, expected in ((960, (960, 3)), (996, (996, 3)), (800, (0, 0))):
        index, token_ids = Lookup(), [*range(1000), *range(place - 3, place)]
        for length in range(1, len(token_ids) + 1):
            index.read(token_ids[:length], 1)
        assert len(index._latest) + len(index._older) <= 2 * 51
        assert index.find(token_ids) == expected


@pytest.mark.parametrize(
    ("token_ids", "place", "expected"),
    [
        ([1, 2, 3, 4, 5], 1, [2, 3, 4]),
        ([1, 2, 3, 4, 5], 3, [4, 5, 4]),  # what repeats so far goes on repeating
        ([1, 2, 3, 4, 5], 4, [5, 5, 5]),
    ],
)
def test_what_follows(token_ids, place, expected):
    assert following(token_ids, place, 3) == expected
    assert following(token_ids, place, 0) == []
