"""What a step may cost: depth is paid for, streams are not held up."""

import pytest

from pyruntime.scheduler.cost import CostModel
from pyruntime.scheduler.simulation import Arrival, Machine, Simulation
from pyruntime.types import Task
from tests.scheduler.world import World


@pytest.mark.parametrize("equal", [0, 3, 100, 4096])
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("row_reads", [0, 2])
def test_the_longest_chunk_within_a_cost_is_found(equal, window, row_reads):
    costs = CostModel(equal, window, head_depth=300)
    for depth in (0, 1, 49, 51, 400, 5000):
        for limit in (-3, 0, 1, 2, 7, 64, 1001):
            most = costs.most_tokens(limit, depth, row_reads)
            within = [n for n in range(max(limit, 0) + 2) if costs.cost(n, depth, row_reads) <= limit]
            assert most == max(within, default=0)


def test_a_token_at_the_depth_of_equal_cost_counts_twice():
    assert CostModel(4096).cost(256, 0) == 256
    assert CostModel(4096).cost(256, 4096) == 512
    assert CostModel(4096, window=1024).cost(256, 30_000) == 320
    assert CostModel(4096, window=1024, head_depth=6144).cost(256, 30_000, row_reads=2) == 320 + 3 * 256


def test_a_prompt_whose_every_row_is_read_by_a_head_comes_in_shorter_chunks():
    world = World(num_blocks=600, budget=64, cached=False, equal_cost_depth=100, head_cost_depth=150)
    plain, read = world.generate([1] * 300)[0], world.generate([2] * 300)[0]
    read.row_reads = 2
    chunks = {plain: [], read: []}
    while read.num_remaining > 1:
        for sequence, length in world.step().entries:
            chunks[sequence].append(length)
    assert chunks[plain][0] == 64
    assert chunks[read][0] <= 64 // (1 + 3)


def test_chunks_shrink_with_depth_and_a_long_text_never_stops():
    world = World(num_blocks=600, budget=64, cached=False, equal_cost_depth=100)
    text = world.embed([1] * 2000)[0]
    chunks = []
    while text.num_remaining:
        chunks.append(world.step().entries[0][1])
    assert chunks[0] == 64
    assert chunks == sorted(chunks, reverse=True)
    assert chunks[-2] == 64 * 100 // (100 + 2000)
    deep = World(num_blocks=600, budget=4, cached=False, equal_cost_depth=1)
    deep.embed([1] * 100)
    deep.drain()


def pauses(window=None, **options):
    """(longest step of the streams alone, longest pause while a long text runs beside them), simulated seconds."""
    found = []
    for long_tokens in (0, 4000):
        arrivals = [Arrival(0.0, Task.GENERATE, 30, new_tokens=400) for _ in range(4)]
        if long_tokens:
            arrivals.append(Arrival(1.0, Task.GENERATE, long_tokens, new_tokens=1))
            arrivals.append(Arrival(1.5, Task.EMBED, 32_000))
        outcome = Simulation(arrivals, machine=Machine(), **options).run()
        streams = [r for r in outcome.requests if r.arrival.new_tokens == 400]
        found.append(max(r.longest_pause_s for r in streams))
    return found


def test_a_long_prompt_never_makes_a_stream_wait_three_of_its_steps():
    normal, beside = pauses()
    assert beside <= 3 * normal
    _, without_limit = pauses(max_pause_factor=0)
    assert without_limit > 6 * normal


def test_the_fixed_bound_holds_at_any_depth():
    normal, beside = pauses(max_pause_factor=0, max_prompt_tokens_beside=100)
    assert beside <= normal + 0.101
