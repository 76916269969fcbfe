"""Tokens behind a shared prefix read as if they stood in one list."""

import numpy as np
import pytest

from pyruntime.scheduler.sequence import Sequence
from pyruntime.scheduler.tokens import SharedTokens
from pyruntime.types import Task
from tests.scheduler.world import World


@pytest.mark.parametrize("prefix", [[], [1], [1, 2, 3, 4]])
@pytest.mark.parametrize("own", [[], [7], [7, 8, 9]])
def test_it_reads_like_the_joined_list(prefix, own):
    tokens, joined = SharedTokens(prefix, list(own)), prefix + own
    assert (len(tokens), [*tokens], np.array(tokens).tolist()) == (len(joined), joined, joined)
    edges = [None, *range(-len(joined) - 2, len(joined) + 3)]
    for start in edges:
        for stop in edges:
            assert tokens[start:stop] == joined[start:stop]
    assert tokens[::-1] == joined[::-1]
    assert [tokens[i] for i in range(-len(joined), len(joined))] == joined * 2
    for outside in (len(joined), -len(joined) - 1):
        with pytest.raises(IndexError):
            tokens[outside]
    tokens.append(5)
    assert [*tokens] == [*joined, 5]
    assert prefix == joined[: len(prefix)]


def test_a_sequence_takes_it_in_place_of_a_list():
    world = World(num_blocks=64, budget=16)
    prefix = [1] * 10
    parent = Sequence(Task.SCORE, prefix, index=-1, is_prefix=True)
    items = [Sequence(Task.SCORE, SharedTokens(prefix, [2, i]), index=i, parent=parent) for i in range(3)]
    stream = Sequence(Task.GENERATE, SharedTokens(prefix, [3]))
    world._add([parent, *items])
    world._add([stream], new_tokens=4)
    world.drain()
    assert len(stream) == 15
    assert [item.cached_tokens for item in items] == [0, 10, 10]
