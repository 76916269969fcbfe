"""Models whose every layer has a sliding window: what fell out of it goes back while the sequence runs."""

import pytest

from pyruntime.scheduler.window import KEYS_A_TILE, first_read
from tests.scheduler.world import World

WINDOW = 70


def world(**options):
    return World(**{"num_blocks": 100, "block_size": 16, "budget": 32, "window": WINDOW} | options)


def test_the_first_key_read_is_where_the_kernels_tile_begins():
    assert first_read(10_000, None) == 0
    assert [first_read(position, WINDOW) for position in (0, 69, 132, 133, 197)] == [0, 0, 0, 64, 128]
    assert all(first_read(p, w) <= max(p - w + 1, 0) for p in range(300) for w in (2, 64, 65))
    assert all(first_read(p, 2) % KEYS_A_TILE == 0 for p in range(300))


def test_prefill_and_decode_hold_no_more_than_the_window():
    w = world(cached=False)
    stream = w.generate(range(300), 300)[0]
    most = 0
    while w.scheduler.has_work:
        w.step()
        most = max(most, w.pool.num_used)
    assert most <= (WINDOW + KEYS_A_TILE + 32) // 16 + 1
    assert len(stream) == 600


def test_the_table_keeps_its_places_and_every_entry_is_a_block_of_its_own():
    w = world()
    stream = w.generate(range(200), 3)[0]
    while not stream.num_generated:
        w.step()
    w.step()
    assert len(stream.blocks) == w.pool.blocks_for(len(stream) - 1)
    assert stream.num_passed == 128 // 16
    assert set(stream.blocks) == set(stream.own_blocks)
    w.drain()


def test_a_prompt_longer_than_the_pool_runs_when_its_window_fits():
    w = world(num_blocks=14, budget=32)
    w.embed(range(1000))
    w.drain()


def test_a_cached_prefix_is_shared_by_its_last_window_alone():
    w = world()
    w.generate(range(300), 1)
    w.drain()
    again = w.generate([*range(300), 7], 1)[0]
    w.step()
    assert again.cached_tokens == 288
    assert w.pool.num_used <= (WINDOW + KEYS_A_TILE) // 16 + 2
    w.drain()


def test_a_prefix_whose_beginning_is_gone_is_not_known():
    w = world(num_blocks=24)
    w.generate(range(300), 1)
    w.drain()
    w.generate(range(1000, 1100), 1)  # takes seven blocks, those that were idle longest among them
    w.drain()
    again = w.generate([*range(300), 7], 1)[0]
    w.drain()
    assert again.cached_tokens % 16 == 0
    assert again.cached_tokens < 288


@pytest.mark.parametrize("length", [128, 129, 135, 199, 200, 257])
def test_children_fork_behind_the_window(length):
    w = world(budget=512)
    w.generate(range(length), 20, n=3)
    w.items(range(1000, 1000 + length), [[1], [2, 3], [4] * 40])
    w.drain()


def test_the_window_is_checked():
    with pytest.raises(ValueError, match="window: 1; allowed: at least 2"):
        world(window=1)
