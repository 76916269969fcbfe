"""Load at simulated time: overload, cancels, priorities and all tasks at once, and the tool that reports on it."""

import json
import random

import pytest

from pyruntime.scheduler.simulation import Arrival, Machine, Simulation, read_arrival
from pyruntime.types import Task
from tools import simulate


def crowd(seed, seconds, rate):
    """Every task, forks, shared prefixes, priorities; a tenth of the clients goes away."""
    rng, time_s = random.Random(seed), 0.0
    while (time_s := time_s + rng.expovariate(rate)) < seconds:
        task = rng.choice(list(Task))
        yield Arrival(
            time_s,
            task,
            prompt_tokens=rng.choice([3, 30, 200]),
            new_tokens=rng.randrange(1, 30) if task is Task.GENERATE else 0,
            items=rng.randrange(1, 4),
            priority=rng.randrange(3),
            prefix_tokens=rng.choice([0, 64, 100]),
            prefix=rng.randrange(3),
            cancel_after_s=rng.expovariate(0.5) if rng.random() < 0.1 else None,
        )


@pytest.mark.parametrize("num_blocks", [60, 2000])
def test_four_times_overload_loses_and_starves_nobody(num_blocks):
    """20 s of about four times what the machine can do: all end once, in a time that the backlog explains."""
    simulation = Simulation(
        crowd(1, 20.0, 20.0),
        machine=Machine(seconds_a_token=0.001),
        num_blocks=num_blocks,
        max_batch_tokens=512,
        max_running=64,
        priority_ageing_s=5.0,
    )
    outcome = simulation.run()
    assert outcome.seconds > 40
    assert len(outcome.requests) > 300
    for request in outcome.requests:
        assert request.ended_at is not None
        assert request.is_cancelled == (request.num_open > 0)
        if not request.is_cancelled and request.arrival.task is Task.GENERATE:
            assert {len(times) for times in request.token_times.values()} == {request.arrival.new_tokens}
            assert len(request.token_times) == request.arrival.items
    assert simulation.pool.num_used == 0
    assert outcome.most_blocks_used <= num_blocks
    load = simulation.scheduler.load()
    assert sum(load.num_waiting.values()) + sum(load.num_running.values()) + load.num_paused == 0


def test_a_flood_of_texts_leaves_a_prompt_its_share():
    """100 s of embeds are queued; a Generate prompt of 1,000 tokens needs the time of twice its own work."""
    flood = [Arrival(0.0, Task.EMBED, 100) for _ in range(1000)]
    prompt = Arrival(1.0, Task.GENERATE, 1000, new_tokens=1)
    outcome = Simulation([*flood, prompt], machine=Machine(base_tokens=0), max_batch_tokens=256).run()
    (request,) = [r for r in outcome.requests if r.arrival.task is Task.GENERATE]
    assert request.ended_at - 1.0 <= 2 * (1000 + 1000 * 500 / 4096) * 0.001 + 0.6


def test_prompts_with_one_beginning_compute_it_once():
    arrivals = [Arrival(0.0, Task.GENERATE, 20, new_tokens=1, prefix_tokens=1600) for _ in range(20)]
    outcome = Simulation(arrivals).run()
    assert outcome.computed_tokens[Task.GENERATE] == 1600 + 20 * 20


def test_the_same_arrivals_give_the_same_figures():
    first, second = (simulate.figures(Simulation(crowd(2, 3.0, 10.0)).run()) for _ in range(2))
    assert first == second


def test_what_does_not_fit_or_makes_no_sense_is_said():
    with pytest.raises(RuntimeError, match="a sequence of 101 tokens does not fit into 64"):
        Simulation([Arrival(0.0, Task.GENERATE, 100, new_tokens=1)], num_blocks=4).run()
    with pytest.raises(ValueError, match="new_tokens: 0; allowed: at least 1"):
        Arrival(0.0, Task.GENERATE, 5)
    for bad in ({}, {"task": "dance"}, {"task": "embed"}, {"task": "embed", "time_s": 0, "prompt_tokens": 1, "x": 1}):
        with pytest.raises(ValueError):
            read_arrival(bad)


def test_the_tool_replays_a_trace(tmp_path, capsys):
    trace = tmp_path / "arrivals.jsonl"
    lines = [{"time_s": 0.1 * i, "task": "embed", "prompt_tokens": 50} for i in range(4)]
    lines += [{"time_s": 0.2, "task": "generate", "prompt_tokens": 10, "new_tokens": 5, "priority": 1}]
    trace.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    simulate.main(["--trace", str(trace)])
    printed = capsys.readouterr().out.splitlines()
    found = json.loads(printed[-1])
    assert {task: f["requests"] for task, f in found["tasks"].items()} == {"embed": 4, "generate": 1}
    assert any(line.split()[:1] == ["queue_p99"] for line in printed)
    trace.write_text('{"task": "embed"}\n')
    with pytest.raises(SystemExit, match="line 1"):
        simulate.main(["--trace", str(trace)])


def test_the_tool_makes_up_a_load(capsys):
    simulate.main(["--seconds", "2", "--seed", "3"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(found["tasks"]) == {task.value for task in Task}
