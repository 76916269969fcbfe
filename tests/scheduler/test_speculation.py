"""When tokens are guessed ahead, how many, whose, and what becomes of the guesses."""

from itertools import pairwise

import pytest
import torch

from pyruntime.scheduler.batch_builder import BatchBuilder
from pyruntime.scheduler.drafter import FIRST_PAUSE, FIRST_RATES, LAST_PAUSE, LONG_MATCH, Acceptance, Drafter
from pyruntime.scheduler.plan import StepPlan
from pyruntime.scheduler.sequence import Sequence, State
from pyruntime.scheduler.speculation import BASE_ROWS, Speculation
from pyruntime.types import Task
from tests.scheduler.world import World

CYCLE = [1, 2, 3, 4, 5]


def cycle(token_ids):
    """Goes on as ``CYCLE`` does."""
    return token_ids[-1] % 5 + 1


def never_twice(token_ids):
    return 100 + len(token_ids)


def world(max_tokens=4, max_rows=8, **options):
    speculation = Speculation(max_tokens, max_rows)
    return World(**{"num_blocks": 200, "budget": 64, "draw": cycle, "speculation": speculation} | options)


def running(w, number, new_tokens=40, **fields):
    """So many streams, behind their prompts."""
    streams = [w.generate(CYCLE * 3, new_tokens, **fields)[0] for _ in range(number)]
    while not all(stream.is_decoding for stream in streams):
        w.scheduler._speculation, kept = None, w.scheduler._speculation
        w.step()
        w.scheduler._speculation = kept
    return streams


def test_drafts_that_are_right_save_steps():
    w, plain = world(), World(num_blocks=200, budget=64, draw=cycle)
    for each in (w, plain):
        running(each, 1)
        each.num_steps = 0
        while each.live:
            each.step()
            each.num_steps += 1
    load = w.scheduler.load()
    assert plain.num_steps == 39
    assert w.num_steps == 8  # of five tokens each, the last of four
    assert load.num_drafted == load.num_accepted == 39 - 8
    assert plain.scheduler.load().num_drafted == 0


def test_drafts_never_reach_beyond_the_last_token():
    w = world(max_tokens=8)
    (stream,) = running(w, 1, new_tokens=4)
    assert [len(drafts) for drafts in w.step().drafts.values()] == [2]
    assert stream.state is State.FINISHED


@pytest.mark.parametrize(("streams", "counts"), [(1, [4]), (3, [2, 2, 1]), (6, [1, 1]), (8, []), (9, [])])
def test_rows_are_bounded_and_shared_out_by_depth(streams, counts, monkeypatch):
    monkeypatch.setattr("pyruntime.scheduler.speculation.BASE_ROWS", 10**6)
    w = world(max_rows=8, max_running=16)
    plan = (running(w, streams), w.plan())[1]
    assert [len(drafts) for drafts in plan.drafts.values()] == counts


def test_many_streams_ask_for_surer_drafts():
    w = world(max_tokens=8, max_rows=32)
    (alone,) = w.scheduler.running or running(w, 1)
    assert len(w.plan().drafts[alone]) > 4
    w = world(max_tokens=8, max_rows=96, max_running=64)
    running(w, 36)  # each row must then be right with three in four
    assert FIRST_RATES[1] ** 2 < 36 / (36 + BASE_ROWS) < FIRST_RATES[1]
    assert {len(drafts) for drafts in w.plan().drafts.values()} == {1}


def test_the_budget_of_a_step_bounds_drafts_too():
    w = world(budget=3)
    (stream,) = running(w, 1)
    assert len(w.plan().drafts[stream]) == 2


def test_no_drafts_without_a_limit_and_none_but_for_streams():
    w = world()
    running(w, 1, drafts=False)
    w.embed(CYCLE * 4)
    assert not w.plan().drafts


def test_nobody_gives_way_for_a_draft():
    """A block that only guesses need is taken where enough others are free for every sequence to grow."""
    counts = []
    for num_free in (0, 2, 3, 4):
        w = world(num_blocks=8 + num_free, block_size=4, cached=False, max_tokens=2)
        streams = running(w, 2)  # 16 tokens each, with the one that the next step computes: four blocks, all full then
        assert [len(stream.blocks) for stream in streams] == [4, 4]
        counts.append([len(drafts) for drafts in w.plan().drafts.values()])
    assert counts == [[], [], [2], [2, 2]]


def test_a_part_of_a_failed_plan_has_the_drafts_of_its_entries():
    plan = StepPlan()
    sequences = [Sequence(Task.GENERATE, [1, 2, 3], state=State.RUNNING) for _ in range(3)]
    for place, sequence in enumerate(sequences):
        plan.add(sequence, 1)
        if place != 1:
            plan.draft(sequence, [7] * (place + 1))
    first, second = plan.halves()
    assert first.drafts == {sequences[0]: [7]}
    assert second.drafts == {sequences[2]: [7, 7, 7]}
    assert (plan.num_tokens, first.num_tokens, second.num_tokens) == (7, 3, 4)


def test_drafts_lie_behind_the_known_tokens_of_a_batch():
    stream = Sequence(Task.GENERATE, [5, 6, 7], blocks=[3, 9], num_computed=2)
    prompt = Sequence(Task.GENERATE, [1, 2, 3, 4], blocks=[1, 2], num_computed=1)
    plan = StepPlan()
    plan.add(stream, 1)
    plan.add(prompt, 2)
    plan.draft(stream, [8, 9])
    batch = BatchBuilder(4).build(plan)
    assert batch.input_ids.tolist() == [7, 8, 9, 2, 3]
    assert batch.positions.tolist() == [2, 3, 4, 1, 2]
    assert batch.query_starts.tolist() == [0, 3, 5]
    assert batch.kv_lengths.tolist() == [5, 3]
    assert batch.slot_mapping.tolist() == [14, 15, 36, 5, 6]
    first, second = batch.rows
    assert (first.reads, first.last, list(first.drafts)) == (True, 0, [8, 9])
    assert (second.reads, second.last, list(second.drafts)) == (False, 4, [])
    assert torch.equal(batch.block_tables, torch.tensor([[3, 9], [1, 2]], dtype=torch.int32))


# -- whether guesses pay --------------------------------------------------------------------------


def test_guesses_that_fail_stop_and_are_tried_again_ever_more_rarely():
    acceptance, tries = Acceptance(0.5), []
    for chance in range(1000):
        if acceptance.num_worthwhile(0.2, 8):
            tries.append(chance)
            acceptance.note(0, 1)
    first = next(place for place, (a, b) in enumerate(pairwise(tries)) if b - a > 1)
    pauses = [b - a - 1 for a, b in pairwise(tries[first:])]
    assert first < 10
    assert pauses[0] > FIRST_PAUSE
    assert pauses == sorted(pauses)
    assert pauses[-1] == LAST_PAUSE
    assert len(tries) < 25


def test_a_guess_that_is_right_brings_them_back():
    acceptance = Acceptance(0.5)
    for _ in range(1000):
        if acceptance.num_worthwhile(0.2, 8):
            acceptance.note(0, 1)
    while not acceptance.num_worthwhile(0.2, 8):
        pass
    acceptance.note(1, 0)
    counts = []
    for _ in range(60):
        counts.append(acceptance.num_worthwhile(0.2, 8))
        acceptance.note(counts[-1], 0)
    assert counts[-1] == 8
    assert counts.count(0) <= 2 * FIRST_PAUSE


@pytest.mark.parametrize(
    ("rate", "least", "most", "expected"),
    [(0.5, 0.2, 8, 2), (0.8, 0.2, 8, 7), (0.8, 0.2, 3, 3), (0.98, 0.5, 64, 34), (0.5, 0.5, 8, 1), (0.4, 0.5, 8, 0)],
)
def test_so_many_that_the_last_still_pays(rate, least, most, expected):
    assert Acceptance(rate).num_worthwhile(least, most) == expected


def test_a_rate_is_never_certain():
    acceptance = Acceptance(0.8)
    acceptance.note(10_000, 0)
    assert acceptance.rate < 1
    assert acceptance.num_worthwhile(0.999, 8) == 0


def proposal(drafter, token_ids, most=8):
    drafter.read(token_ids, 100)
    return drafter.propose(token_ids, 0.2, most)


def test_a_drafter_learns_from_what_came_and_only_once():
    drafter, token_ids = Drafter(), [*range(10), *range(5)]
    drafts = proposal(drafter, token_ids)
    assert drafts == [5, 6]  # five equal tokens: not a long match
    drafter.offer(token_ids, drafts)
    before = drafter._acceptances[0].rate
    proposal(drafter, token_ids)  # the step failed: nothing came, nothing is learnt
    assert drafter._acceptances[0].rate == before
    drafter.offer(token_ids, [5, 6])
    token_ids += [5, 9, 9, 9]
    proposal(drafter, token_ids)
    learnt = drafter._acceptances[0].rate
    expected = Acceptance(before)
    expected.note(1, 1)
    assert learnt == expected.rate
    proposal(drafter, token_ids)
    assert drafter._acceptances[0].rate == learnt


def test_long_matches_are_judged_apart():
    drafter, token_ids = Drafter(), [*range(20), *range(LONG_MATCH)]
    for _ in range(30):
        drafter._acceptances[0].note(0, 1)
    assert proposal(drafter, token_ids, 4) == list(range(LONG_MATCH, LONG_MATCH + 4))
    assert proposal(drafter, [*range(20), *range(LONG_MATCH), 50, 0, 1, 2], 4) == []


def test_a_step_reads_so_many_tokens_of_all_prompts_together(monkeypatch):
    monkeypatch.setattr("pyruntime.scheduler.speculation.MOST_READ", 10)
    w = world()
    running(w, 2)  # of 16 tokens each
    counts = [len(w.step().drafts) for _ in range(7)]
    assert counts == sorted(counts)
    assert (counts[:2], counts[-1]) == ([0, 1], 2)


def test_a_text_without_repeats_is_never_guessed_at():
    w = world(draw=never_twice)
    running(w, 2)
    while w.live:
        w.step()
    assert w.scheduler.load().num_drafted == 0
