"""Hostile constraints over a real channel, while others generate: bounded errors, and nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
from collections import Counter

import grpc
import pytest

from pyruntime.config import Settings
from pyruntime.constraints import lanes
from pyruntime.constraints.compiler import ConstraintCompiler
from pyruntime.constraints.grammar import ConstraintText
from pyruntime.constraints.guard import Guard
from pyruntime.constraints.vocabulary import known_vocabulary
from pyruntime.registry import ModelRegistry
from pyruntime.service.generate import end_of_sequence_ids
from pyruntime.service.server_builder import build_server
from pyruntime.serving import load_served_model
from pyruntime.types import GenerateRequest, SamplingParams, StopParams
from pyruntime.v1 import generate_pb2, generate_pb2_grpc
from tests.fakes import EOS
from tests.models.byte_model import save_byte_model

NUM_BOMBS = 1000
Code = grpc.StatusCode


def bomb(salt: int) -> generate_pb2.GenerateRequest:
    """A text of its own each time, that would take minutes to compile."""
    any_of = [{"anyOf": [{"type": "string", "pattern": f"a{i}.*"}, {"type": "integer"}]} for i in range(26)]
    schema = json.dumps({"allOf": any_of, "title": str(salt)})
    return generate_pb2.GenerateRequest(text="x", constraint={"json_schema": schema})


def plain(regex: str, **fields) -> generate_pb2.GenerateRequest:
    return generate_pb2.GenerateRequest(text="x", constraint={"regex": regex}, **fields)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_byte_model(tmp_path_factory.mktemp("bytes")))


def loaded(folder, **settings):
    return load_served_model(
        "bytes", folder, Settings(dtype="float32", kv_cache_bytes=2**24, **settings), lambda _: None
    )


@pytest.fixture
def model(folder):
    """For one server: its drain ends the engine's work."""
    model = loaded(folder)
    yield model
    model.close()


@contextlib.asynccontextmanager
async def serving(model, **settings):
    """(stub, server); drained at the end, and then without a process of its own."""
    before = children()
    registry = ModelRegistry()
    registry.declare(model.info.name)
    registry.set_serving(model.info.name, model)
    server = build_server(registry, Settings(port=0, **settings))
    port = await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield generate_pb2_grpc.GenerateServiceStub(channel), server
    finally:
        await server.drain(0)
    async with asyncio.timeout(20):
        while children() - before:
            await asyncio.sleep(0.005)


def children() -> set[str]:
    """Processes of this one, those included that have ended and nobody has asked after."""
    found: set[str] = set()
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/children") as file:
            found |= set(file.read().split())
    return found


async def code_of(call) -> Code:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    except asyncio.CancelledError:
        return Code.CANCELLED
    return Code.OK


async def is_compiling(server, at_least: int = 1) -> None:
    async with asyncio.timeout(20):
        while server._room.constraints.num_jobs < at_least:
            await asyncio.sleep(0.002)


async def is_idle(server) -> None:
    async with asyncio.timeout(20):
        while server._room.constraints.num_jobs or server.num_running:
            await asyncio.sleep(0.002)


def test_a_model_is_loaded_with_what_constraints_need_of_it(model):
    """Making it holds the interpreter lock, which no stream should wait for."""
    assert known_vocabulary(model.tokenizer, model.info.vocab_size, end_of_sequence_ids(model)) is not None


async def test_a_thousand_bombs_hold_nobody_up(model, monkeypatch):
    monkeypatch.setattr(lanes, "MAX_WAIT_S", 1.0)
    async with serving(model) as (stub, server):
        expected = (await stub.Generate(plain("(ab|cd){30}e", sampling={"seed": 4}))).completions[0].text
        bombs = [stub.Generate(bomb(salt)) for salt in range(NUM_BOMBS)]
        codes = [asyncio.create_task(code_of(each)) for each in bombs]
        await is_compiling(server)
        free = stub.Generate(generate_pb2.GenerateRequest(text="y", stop={"max_new_tokens": 50, "ignore_eos": True}))
        known = stub.Generate(plain("(ab|cd){30}e", sampling={"seed": 4}))
        with contextlib.suppress(grpc.aio.AioRpcError):  # a queue that is full takes nobody
            assert len((await free).completions[0].token_ids) == 50
        try:
            assert (await known).completions[0].text == expected
        except grpc.aio.AioRpcError as error:
            assert error.code() is Code.RESOURCE_EXHAUSTED
        for each in bombs:
            each.cancel()
        counts = Counter(await asyncio.gather(*codes))
        assert counts[Code.RESOURCE_EXHAUSTED] > 0
        kinds = {Code.INVALID_ARGUMENT, Code.RESOURCE_EXHAUSTED, Code.CANCELLED}
        assert sum(counts[kind] for kind in kinds) == NUM_BOMBS
        await is_idle(server)
        again = await stub.Generate(plain("(ab|cd){30}e", sampling={"seed": 4}))
        assert again.completions[0].text == expected


@pytest.mark.parametrize("ends", ["cancelled", "deadline"])
async def test_a_call_that_ends_while_it_is_compiled_ends_the_compiling(model, ends):
    async with serving(model) as (stub, server):
        timeout = 0.7 if ends == "deadline" else None
        calls = [stub.Generate(bomb(0), timeout=timeout), stub.GenerateStream(bomb(1), timeout=timeout)]
        codes = [asyncio.create_task(code_of(calls[0])), asyncio.create_task(code_of(calls[1].read()))]
        await is_compiling(server, 2)
        if ends == "cancelled":
            for call in calls:
                call.cancel()
        wanted = Code.CANCELLED if ends == "cancelled" else Code.DEADLINE_EXCEEDED
        assert await asyncio.gather(*codes) == [wanted, wanted]
        await is_idle(server)


async def test_a_drain_ends_what_is_being_compiled(model):
    async with serving(model) as (stub, server):
        codes = [asyncio.create_task(code_of(stub.Generate(bomb(salt)))) for salt in range(4)]
        await is_compiling(server, 2)
        await server.drain(0.1)
        assert set(await asyncio.gather(*codes)) <= {Code.UNAVAILABLE, Code.CANCELLED}


async def test_a_bomb_names_its_field_and_limit(model, monkeypatch):
    monkeypatch.setattr("pyruntime.constraints.compiler.COMPILE_CPU_S", 0.3)
    monkeypatch.setattr("pyruntime.constraints.compiler.Guard", lambda cpu_s=0.3: Guard(cpu_s))
    async with serving(model) as (stub, _):
        for _ in range(2):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Generate(bomb(0))
            assert caught.value.code() is Code.INVALID_ARGUMENT
            assert caught.value.details() == "constraint.json_schema: takes more than 0.3 s to compile"


async def test_a_reader_who_falls_behind_pauses_a_constraint_and_loses_nothing(folder):
    model, compiler = loaded(folder, stream_buffer_tokens=4), ConstraintCompiler()
    text, pattern = ConstraintText("regex", ("(ab|cd|ef){60}g",)), re.compile("(ab|cd|ef){60}g")
    found, most_paused = [], 0
    for is_slow in (False, True):
        constraint = await compiler.compile(text, model.tokenizer, model.info.vocab_size, frozenset({EOS}))
        stop = StopParams(max_new_tokens=200, token_ids=frozenset({EOS}))
        job = GenerateRequest([1, 2, 3], SamplingParams(seed=8), stop, n=2, constraint=constraint)
        tokens: list[list[int]] = [[], []]
        async for events in model.engine.generate(job):
            for event in events:
                tokens[event.index] += [event.token_id] if event.token_id is not None else []
            async with asyncio.timeout(20):
                while is_slow and not most_paused:  # the reader comes back once both have been paused
                    most_paused = model.engine.load().scheduler.num_paused // 2
                    await asyncio.sleep(0.002)
        found.append(tokens)
    compiler.close()
    model.close()
    assert found[0] == found[1]
    assert all(pattern.fullmatch(bytes(each).decode()) for each in found[1])


@pytest.mark.parametrize("temperature", [0, 0.01, 1])
async def test_a_bias_against_all_that_is_allowed_changes_nothing_that_may_follow(model, temperature):
    bias = dict.fromkeys(range(260), -3e38)
    sampling = {"seed": 1, "temperature": temperature, "logit_bias": bias}
    async with serving(model) as (stub, _):
        call = stub.Generate(plain("[ab]{3}c", sampling=sampling))
        try:
            assert re.fullmatch("[ab]{3}c", (await call).completions[0].text)
        except grpc.aio.AioRpcError as error:
            assert error.code() is Code.INVALID_ARGUMENT, error.details()
        answer = await stub.Generate(plain("a{3}b?", sampling={"logit_bias": {EOS: 99.0}, "temperature": temperature}))
        assert answer.completions[0].text in ("aaa", "aaab")


async def test_a_prompt_that_is_cached_changes_no_constrained_text(model):
    prompt = "the same beginning of a prompt " * 6
    async with serving(model) as (stub, _):
        answers = []
        for _ in range(3):
            message = plain("[a-d]{20,40}e", sampling={"seed": 5}, n=4)
            message.text = prompt
            answers.append(await stub.Generate(message))
    assert answers[1].usage.cached_tokens > 0
    assert len({tuple(each.text for each in answer.completions) for answer in answers}) == 1
