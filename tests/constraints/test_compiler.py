"""Compiling within limits: what is kept, what is refused, and what hostile texts come to."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import threading
import weakref
from types import SimpleNamespace

import pytest
from llguidance import LLParserLimits

from pyruntime.constraints import lanes
from pyruntime.constraints.compiler import MOST_CACHED, ConstraintCompiler
from pyruntime.constraints.grammar import MAX_CONSTRAINT_BYTES, ConstraintText
from pyruntime.constraints.guard import Guard, TookTooLong, TookTooMuch
from pyruntime.constraints.lanes import Lane
from pyruntime.constraints.vocabulary import vocabulary_of
from pyruntime.errors import CapabilityMissing, InvalidField, Overloaded
from tests.fakes import EOS, byte_tokenizer


def all_of(count: int, salt: int = 0) -> str:
    """Every further member doubles what the compiler has to look at."""
    any_of = [{"anyOf": [{"type": "string", "pattern": f"a{i}.*"}, {"type": "integer"}]} for i in range(count)]
    return json.dumps({"allOf": any_of, "title": str(salt)})


def asked(kind: str, text: str) -> dict:
    return {"kind": kind, "texts": [text], "special_names": [], "num_ids": 0}


async def test_one_request_does_not_use_up_the_limits_of_another(compile_, monkeypatch):
    """The library counts the states of a lexer for all copies of it."""
    few = LLParserLimits(max_lexer_states=60, verbose_errors=False, precompute_large_lexemes=False)
    monkeypatch.setattr("pyruntime.constraints.matcher.limits", lambda: few)
    first, second = await compile_("regex", "[ab]{1,300}"), await compile_("regex", "[ab]{1,300}")
    greedy, beside, other = *(first.matcher(frozenset({EOS})) for _ in range(2)), second.matcher(frozenset({EOS}))
    with pytest.raises(InvalidField, match=r"constraint\.regex: .*too many states"):
        for _ in range(100):
            greedy.advance(ord("a"))
    with pytest.raises(InvalidField, match="too many states"):  # which are one request's
        beside.advance(ord("b"))
    for matcher in (other, (await compile_("regex", "[ab]{1,300}")).matcher(frozenset({EOS}))):
        assert not any(matcher.advance(ord("a")) for _ in range(20))


async def test_what_is_left_of_processor_time_is_one_requests(compile_):
    constraint, other = await compile_("regex", "a+"), await compile_("regex", "a+")
    matchers = [constraint.matcher(frozenset({EOS})) for _ in range(2)]
    constraint.spend(1.9)
    assert not matchers[0].advance(ord("a"))
    with pytest.raises(InvalidField, match=r"constraint\.regex: is too costly to follow.*2 s and 2 ms more a token"):
        constraint.spend(0.2)
    with pytest.raises(InvalidField, match="too costly"):
        matchers[1].advance(ord("a"))
    assert not other.matcher(frozenset({EOS})).advance(ord("a"))


def test_what_takes_too_long_ends_with_its_process_and_the_next_one_starts_another():
    guard = Guard(cpu_s=0.2)
    with pytest.raises(TookTooLong):
        guard.ask(asked("json_schema", all_of(24)))
    assert "grammar" in guard.ask(asked("regex", "a+"))
    assert "unclosed" in guard.ask(asked("regex", "(a"))["problem"]
    guard.close()


async def test_what_takes_longer_than_most_is_asked_again_and_then_an_error(tokenizer, monkeypatch):
    monkeypatch.setattr("pyruntime.constraints.compiler.QUICK_CPU_S", 0.05)
    monkeypatch.setattr("pyruntime.constraints.compiler.COMPILE_CPU_S", 0.2)
    monkeypatch.setattr("pyruntime.constraints.compiler.Guard", lambda cpu_s=0.2: Guard(cpu_s))
    compiler = ConstraintCompiler()
    text = ConstraintText("json_schema", (all_of(24),))
    for _ in range(2):
        with pytest.raises(InvalidField, match=r"constraint\.json_schema: takes more than 0\.2 s to compile"):
            await compiler.compile(text, tokenizer, 260, frozenset({EOS}))
    assert compiler.num_compiled == 1
    compiler.close()


def test_a_checker_that_was_ended_from_outside_is_started_again():
    guard = Guard()
    assert "grammar" in guard.ask(asked("regex", "a"))
    first = guard._process
    first.kill()
    first.wait()
    assert "grammar" in guard.ask(asked("regex", "a"))
    guard.close()


def test_what_takes_too_much_memory_ends_with_its_process():
    guard = Guard(memory_bytes=2**27 + 2**26)
    with pytest.raises(TookTooMuch):
        guard.ask(asked("json_schema", all_of(19)))
    guard.close()


def test_a_checker_gives_back_the_memory_that_it_has_taken():
    guard = Guard()
    resident = []
    for text in (all_of(1), all_of(18), all_of(2)):
        guard.ask(asked("json_schema", text))
        with open(f"/proc/{guard._process.pid}/statm") as file:
            resident.append(int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
    guard.close()
    assert resident[2] < resident[0] + 2**25


def test_a_checker_that_cannot_run_is_no_fault_of_the_client(monkeypatch):
    monkeypatch.setattr("sys.executable", "/bin/false")
    guard = Guard()
    with pytest.raises(RuntimeError, match="ended with 1"):
        guard.ask(asked("regex", "a"))


def running_children() -> set[int]:
    """Processes of this one that run or wait to be taken note of."""
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        own = {int(each) for each in file.read().split()}
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/children") as file:
            own |= {int(each) for each in file.read().split()}
    return own


async def started(lane: Lane) -> None:
    """Until a process is at work."""
    while not any(each.guard is not None and each.guard._process is not None for each in lane._asked.values()):
        await asyncio.sleep(0.002)


@pytest.mark.parametrize("how", ["cancelled", "closed"])
async def test_nobody_waits_any_more_so_its_process_is_ended(tokenizer, how):
    before = running_children()
    compiler = ConstraintCompiler(num_threads=1)
    text = ConstraintText("json_schema", (all_of(24),))
    calls = [asyncio.create_task(compiler.compile(text, tokenizer, 260, frozenset({EOS}))) for _ in range(3)]
    await started(compiler._quick)
    if how == "closed":
        compiler.close()
    for place, call in enumerate(calls):
        assert how == "closed" or compiler._quick.num_jobs or compiler._slow.num_jobs, place
        call.cancel()
        await asyncio.wait([call])
        assert call.cancelled() or call.exception() is not None
    while compiler.num_jobs:
        await asyncio.sleep(0.002)
    if how == "cancelled":
        assert (await compiler.compile(ConstraintText("regex", ("a",)), tokenizer, 260, frozenset({EOS}))).field
        compiler.close()
    while running_children() - before:
        await asyncio.sleep(0.002)


async def test_what_compiles_slowly_is_compiled_in_its_own_lane(tokenizer, monkeypatch):
    compiler = ConstraintCompiler()
    monkeypatch.setattr("pyruntime.constraints.compiler.QUICK_CPU_S", 0.0)
    compiler._quick.run = None  # nothing but the check goes there
    vocabulary_of(tokenizer, 260, frozenset({EOS}))
    constraint = await compiler.compile(ConstraintText("regex", ("ab+",)), tokenizer, 260, frozenset({EOS}))
    assert not constraint.matcher(frozenset({EOS})).advance(ord("a"))
    compiler.close()


async def test_one_text_is_checked_once_for_all_who_wait(tokenizer):
    compiler = ConstraintCompiler()
    calls = (compiler.compile(ConstraintText("regex", ("a+",)), tokenizer, 260, frozenset({EOS})) for _ in range(50))
    assert len({id(each) for each in await asyncio.gather(*calls)}) == 50
    assert compiler.num_compiled == 1
    compiler.close()


async def test_ordinary_texts_do_not_wait_for_slow_ones_and_too_many_are_turned_away(tokenizer, monkeypatch):
    monkeypatch.setattr(lanes, "MAX_WAIT_S", 2.0)
    compiler = ConstraintCompiler()
    bombs = [ConstraintText("json_schema", (all_of(24, salt),)) for salt in range(1000)]
    calls = [asyncio.create_task(compiler.compile(each, tokenizer, 260, frozenset({EOS}))) for each in bombs]
    await started(compiler._slow)
    plain = [compiler.compile(ConstraintText("regex", (f"a{i}",)), tokenizer, 260, frozenset({EOS})) for i in range(3)]
    outcomes = await asyncio.gather(*plain, return_exceptions=True)
    assert all(isinstance(each, Overloaded) or each.field == "constraint.regex" for each in outcomes)
    for call in calls:
        call.cancel()
    await asyncio.wait(calls)
    refused = [call.exception() for call in calls if not call.cancelled() and call.exception()]
    assert refused
    assert all(isinstance(each, Overloaded) and each.retry_after_s > 2 for each in refused)
    constraint = await compiler.compile(ConstraintText("regex", ("b",)), tokenizer, 260, frozenset({EOS}))
    assert constraint.field == "constraint.regex"
    compiler.close()


async def test_what_has_waited_too_long_is_turned_away_when_its_turn_comes(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(lanes, "time", SimpleNamespace(monotonic=lambda: clock.now))
    lane, may_end = Lane("test", 1, Guard, expected_s=0.001), threading.Event()
    first = asyncio.create_task(lane.run(may_end.wait))
    others = [asyncio.create_task(lane.run(int)) for _ in range(50)]
    while lane.num_jobs < 51:
        await asyncio.sleep(0)
    clock.now = lanes.MAX_WAIT_S + 1
    may_end.set()
    assert await first
    outcomes = await asyncio.gather(*others, return_exceptions=True)
    assert all(isinstance(each, Overloaded) for each in outcomes)
    while lane.num_jobs:
        await asyncio.sleep(0)
    assert await lane.run(int) == 0
    lane.close()


@pytest.mark.parametrize("kind", ["regex", "grammar", "json_schema", "choice"])
async def test_long_texts_are_refused_unread(compile_, kind):
    half = "é" * (MAX_CONSTRAINT_BYTES // 4)
    texts = ["x", half, half] if kind == "choice" else ["x" + half + half]
    problem = f"has {MAX_CONSTRAINT_BYTES + 1} bytes; allowed: at most {MAX_CONSTRAINT_BYTES}"
    with pytest.raises(InvalidField, match=problem):
        await compile_(kind, *texts)


async def test_a_verdict_is_kept_and_so_is_a_bad_one(tokenizer):
    compiler = ConstraintCompiler(num_threads=1)

    async def compiled(kind, text):
        return await compiler.compile(ConstraintText(kind, (text,)), tokenizer, 260, frozenset({EOS}))

    assert await compiled("regex", "a") is not await compiled("regex", "a")
    for _ in range(2):
        with pytest.raises(InvalidField, match="unclosed"):
            await compiled("regex", "(")
        with pytest.raises(InvalidField, match="but the empty one"):
            await compiled("grammar", 'start: ""')
    assert compiler.num_compiled == 3
    await compiled("choice", "a")
    assert compiler.num_compiled == 4
    compiler.close()


async def test_the_least_recently_used_goes_first(tokenizer):
    compiler = ConstraintCompiler()

    async def compiled(text):
        return await compiler.compile(ConstraintText("choice", (text,)), tokenizer, 260, frozenset({EOS}))

    for i in range(MOST_CACHED):
        await compiled(f"x{i}")
    await compiled("x0")
    assert compiler.num_compiled == MOST_CACHED
    await compiled("one more")
    await compiled("x0")
    assert compiler.num_compiled == MOST_CACHED + 1
    await compiled("x1")
    assert compiler.num_compiled == MOST_CACHED + 2
    compiler.close()


async def test_constraints_go_with_their_model(compiler):
    tokenizer = byte_tokenizer()
    constraint = await compiler.compile(ConstraintText("regex", ("a",)), tokenizer, 260, frozenset({EOS}))
    gone = weakref.ref(constraint.vocabulary)
    del constraint, tokenizer
    await asyncio.sleep(0)  # the task lets go of the last result
    gc.collect()
    assert gone() is None


async def test_a_model_that_never_ends_cannot_be_constrained(compiler):
    for _ in range(2):
        with pytest.raises(CapabilityMissing, match="end-of-sequence"):
            await compiler.compile(ConstraintText("regex", ("a",)), byte_tokenizer(), 260, frozenset())
