"""Compiling within limits: what is kept, what is refused, and what hostile texts come to."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref

import pytest

from pyruntime.constraints.compiler import MOST_CACHED, ConstraintCompiler
from pyruntime.constraints.grammar import MAX_CONSTRAINT_BYTES, ConstraintText, grammar_of
from pyruntime.constraints.guard import Guard
from pyruntime.errors import CapabilityMissing, InvalidField
from tests.fakes import EOS, byte_tokenizer


def all_of(count: int) -> str:
    """Every further member doubles what the compiler has to look at."""
    any_of = [{"anyOf": [{"type": "string", "pattern": f"a{i}.*"}, {"type": "integer"}]} for i in range(count)]
    return json.dumps({"allOf": any_of})


DOUBLING = "\n".join([*(f"T{i}: T{i + 1} T{i + 1}" for i in range(40)), 'T40: "a"'])
BOMBS = {
    "unclosed": ("regex", "(" * 30_000, "invalid regex"),
    "nested brackets": ("json_schema", "[" * 60_000, "is no JSON schema"),
    "nested objects": ("json_schema", '{"properties":{"a":' * 2000 + "{}" + "}}" * 2000, "is no JSON schema"),
    "doubling terminals": ("grammar", f"start: T0\n{DOUBLING}", "too big"),
    "a reference to itself": ("json_schema", '{"$ref":"#"}', "no text conforms"),
    "a remote file": ("json_schema", '{"$ref":"file:///etc/hostname"}', "does not compile"),
}


async def test_counts_within_counts_cost_nothing_until_they_are_followed(compile_):
    constraint = await compile_("regex", "((((a{1,999}){1,999}){1,999}b){1,999}c?){1,999}" * 40)
    matcher = constraint.matcher(frozenset({EOS}))
    try:
        ended = [matcher.advance(ord("a")) for _ in range(20)]
        assert not any(ended)
    except InvalidField as error:
        assert "too costly to follow" in error.problem


@pytest.mark.parametrize(("kind", "text", "problem"), BOMBS.values(), ids=BOMBS)
async def test_hostile_texts_are_refused_within_the_librarys_limits(compile_, kind, text, problem):
    with pytest.raises(InvalidField) as caught:
        await compile_(kind, text)
    assert caught.value.field == f"constraint.{kind}"
    assert problem in caught.value.problem
    assert len(caught.value.message) < 400


def test_what_takes_too_long_ends_with_its_process_and_the_next_one_starts_another():
    guard = Guard(cpu_s=0.2)
    assert "takes more than 0.2 s" in guard.complaint(grammar_of(ConstraintText("json_schema", (all_of(24),))))
    assert guard.complaint(grammar_of(ConstraintText("regex", ("a+",)))) == ""
    assert "unclosed" in guard.complaint(grammar_of(ConstraintText("regex", ("(a",))))
    guard.close()


def test_a_checker_that_was_ended_from_outside_is_started_again():
    guard = Guard()
    assert guard.complaint('start: "a"') == ""
    first = guard._process
    first.kill()
    first.wait()
    assert guard.complaint('start: "a"') == ""
    guard.close()


async def test_closing_ends_the_checkers(tokenizer):
    compiler = ConstraintCompiler(num_threads=1)
    await compiler.compile(ConstraintText("regex", ("a",)), tokenizer, 260, frozenset({EOS}))
    guard = compiler._guards.get_nowait()
    process = guard._process
    compiler._guards.put(guard)
    compiler.close()
    assert process.returncode is not None


def test_what_takes_too_much_memory_ends_with_its_process():
    guard = Guard(memory_bytes=2**27)
    problem = guard.complaint(grammar_of(ConstraintText("json_schema", (all_of(19),))))
    assert "MiB of memory" in problem
    guard.close()


def test_a_checker_that_cannot_run_is_no_fault_of_the_client(monkeypatch):
    monkeypatch.setattr("sys.executable", "/bin/false")
    guard = Guard()
    with pytest.raises(RuntimeError, match="ended with 1"):
        guard.complaint('start: "a"')


@pytest.mark.parametrize("kind", ["regex", "grammar", "json_schema", "choice"])
async def test_long_texts_are_refused_unread(compile_, kind):
    half = "é" * (MAX_CONSTRAINT_BYTES // 4)
    texts = ["x", half, half] if kind == "choice" else ["x" + half + half]
    problem = f"has {MAX_CONSTRAINT_BYTES + 1} bytes; allowed: at most {MAX_CONSTRAINT_BYTES}"
    with pytest.raises(InvalidField, match=problem):
        await compile_(kind, *texts)


async def test_a_constraint_is_compiled_once_and_so_is_a_bad_one(compiler, compile_):
    first = await compile_("regex", "a")
    assert await compile_("regex", "a") is first
    for _ in range(2):
        with pytest.raises(InvalidField, match="unclosed"):
            await compile_("regex", "(")
    assert compiler.num_compiled == 2
    assert await compile_("choice", "a") is not first


async def test_the_least_recently_used_goes_first(compiler, compile_):
    first = await compile_("choice", "x0")
    for i in range(1, MOST_CACHED):
        await compile_("choice", f"x{i}")
    assert await compile_("choice", "x0") is first
    await compile_("choice", "one more")
    assert await compile_("choice", "x0") is first
    before = compiler.num_compiled
    await compile_("choice", "x1")
    assert compiler.num_compiled == before + 1


async def test_constraints_go_with_their_model(compiler):
    tokenizer = byte_tokenizer()
    text = ConstraintText("regex", ("a",))
    gone = weakref.ref(await compiler.compile(text, tokenizer, 260, frozenset({EOS})))
    del tokenizer
    await asyncio.sleep(0)  # the task lets go of the last result
    gc.collect()
    assert gone() is None


async def test_a_model_that_never_ends_cannot_be_constrained(tokenizer):
    compiler = ConstraintCompiler()
    with pytest.raises(CapabilityMissing, match="end-of-sequence"):
        await compiler.compile(ConstraintText("regex", ("a",)), tokenizer, 260, frozenset())
    compiler.close()
