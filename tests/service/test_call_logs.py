"""What the log says of calls, over real sockets, and what it never says: the clients' texts."""

from __future__ import annotations

import asyncio
import logging
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from pyruntime.config import Settings
from pyruntime.service.calls import why_cancelled
from pyruntime.types import Capability
from pyruntime.v1 import embed_pb2, generate_pb2, model_pb2, score_pb2
from tests.fake_compute import until
from tests.fakes import fake_model
from tests.service.bad_requests import BAD_EMBED, BAD_GENERATE, BAD_SCORE
from tests.service.call_site import Log, call_site
from tests.service.conftest import SETTINGS, Stack

CANARY = "Canary7311"
GENERATE = generate_pb2.GenerateRequest(text="hi", stop=generate_pb2.Stop(max_new_tokens=5))
EMBED = embed_pb2.EmbedRequest(model="decoder", inputs=[{"text": "words"}])


async def ended(call: Any) -> None:
    """However it ends."""
    try:
        if isinstance(call, (grpc.aio.UnaryStreamCall, grpc.aio.StreamStreamCall)):
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError:
        pass


# -- what is said --------------------------------------------------------------------------------


async def test_a_line_for_each_call():
    before = datetime.now(UTC)
    with Log().kept() as log:
        async with call_site(Settings(port=0)) as (stack, _):
            await stack.generate.Generate(GENERATE, metadata=(("x-request-id", "mine"),))
    (line,) = log.calls
    assert before <= datetime.fromisoformat(line.pop("time")) <= datetime.now(UTC)
    duration, parts = line.pop("duration_ms"), [line.pop(f"{name}_ms") for name in ("tokenize", "queue", "compute")]
    assert 0 < sum(parts) <= duration
    assert line == {
        "level": "INFO",
        "logger": "pyruntime.access",
        "message": "call",
        "method": "pyruntime.v1.GenerateService/Generate",
        "code": "OK",
        "model": "decoder",
        "requests": 1,
        "prompt_tokens": 3,
        "completion_tokens": 5,
        "cached_tokens": 0,
        "request_id": "mine",
    }


async def test_the_time_of_a_line_is_utc():
    with Log().kept() as log:
        logging.getLogger("any").info("hello")
    (line,) = [each for each in log.lines if each["logger"] == "any"]
    assert datetime.fromisoformat(line["time"]).utcoffset() == timedelta(0)


async def test_a_refused_call_is_told_by_reason_and_path(stack: Stack):
    with Log().kept() as log:
        await ended(stack.embed.Embed(embed_pb2.EmbedRequest(model="decoder", inputs=[{"text": CANARY * 200}])))
        await ended(stack.models.GetModel(model_pb2.GetModelRequest(model=CANARY)))
        await ended(stack.channel.unary_unary(f"/{CANARY}/{CANARY}")(b""))
    said = [
        (line["method"].rpartition("/")[2], line["code"], line.get("reason"), line.get("field")) for line in log.calls
    ]
    assert said == [
        ("Embed", "INVALID_ARGUMENT", "INVALID_FIELD", "inputs[0].text"),
        ("GetModel", "NOT_FOUND", "NOT_FOUND", None),
        ("_OTHER", "UNIMPLEMENTED", None, None),
    ]
    assert CANARY not in log.raw


async def test_cancelled_calls(stack: Stack):
    stack.engine.block = True
    with Log().kept() as log:
        call = stack.embed.Embed(EMBED)
        await stack.engine.blocked.wait()
        call.cancel()
        await until(lambda: stack.server.num_running == 0 and log.calls)
    assert [(line["code"], line["model"]) for line in log.calls] == [("CANCELLED", "decoder")]


@pytest.mark.parametrize(
    ("remaining_s", "code"),
    [(None, "CANCELLED"), (5.0, "CANCELLED"), (0.05, "DEADLINE_EXCEEDED"), (0.0, "DEADLINE_EXCEEDED")],
)
def test_a_call_that_is_given_up_at_its_deadline_is_late(remaining_s: float | None, code: str):
    assert why_cancelled(SimpleNamespace(time_remaining=lambda: remaining_s)) == code


async def test_probes_are_for_debugging_and_faults_are_warnings(stack: Stack):
    stack.engine.refusal = ValueError(CANARY)
    with Log().kept() as log:
        await stack.health.Check(health_pb2.HealthCheckRequest())
        await ended(stack.embed.Embed(EMBED))
    assert [(line["level"], line["code"]) for line in log.calls] == [("DEBUG", "OK"), ("WARNING", "INTERNAL")]


async def test_access_lines_can_be_left_out():
    with Log().kept() as log:
        async with call_site(Settings(port=0, access_log=False)) as (stack, _):
            await stack.embed.Embed(EMBED)
    assert log.calls == []


async def test_every_line_that_a_call_causes_has_its_id(stack: Stack):
    """Also one that is written by a worker thread."""

    def broken(*_: Any, **__: Any) -> None:
        logging.getLogger("worker").warning("here")
        raise ValueError(CANARY)

    stack.decoder.tokenizer.pieces = broken  # type: ignore[method-assign]
    text = "a" * 900
    request = model_pb2.TokenizeRequest(model="decoder", text=text + "b" * 90)
    with Log().kept() as log:
        workers = stack.server._room.workers
        workers.run = lambda _, function, *args: workers.run_aside(function, *args)  # type: ignore[method-assign]
        await ended(stack.models.Tokenize(request, metadata=(("x-request-id", "mine"),)))
    of_call = [line for line in log.lines if line.get("request_id") == "mine"]
    assert [line["logger"] for line in of_call] == ["worker", "pyruntime.service.status", "pyruntime.access"]
    stack_of_error = of_call[1]["stack"]
    assert stack_of_error.endswith("builtins.ValueError")
    assert "in broken" in stack_of_error
    assert CANARY not in log.raw


# -- what is not said ----------------------------------------------------------------------------


def marked(message: Any) -> Any:
    """A copy whose every text, at whatever depth, holds the canary; names of models and requests apart."""
    copy = type(message)()
    copy.CopyFrom(message)
    _mark(copy)
    return copy


def _mark(message: Message) -> None:
    for field, value in message.ListFields():
        if field.name in ("model", "request_id"):
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            continue
        items = list(value) if field.is_repeated else [value]
        if field.message_type is not None:
            for item in items:
                _mark(item)
        elif isinstance(items[0], str):
            texts = [f"{item[:50]} {CANARY}" for item in items]
            if field.is_repeated:
                del value[:]
                value.extend(texts)
            else:
                setattr(message, field.name, texts[0])


TEXTS = [
    GENERATE,
    generate_pb2.GenerateRequest(chat={"messages": [{"role": "user", "content": "hi"}], "tools_json": ["{}"]}),
    generate_pb2.GenerateRequest(chat={"messages": [{"role": "robot", "content": "hi"}]}),
    generate_pb2.GenerateRequest(text="hi", constraint={"regex": "(a"}),
    generate_pb2.GenerateRequest(text="hi", constraint={"json_schema": '{"const": 1}'}),
    generate_pb2.GenerateRequest(text="hi", constraint={"grammar": "start: other"}),
    generate_pb2.GenerateRequest(text="hi", constraint={"choice": {"options": ["a"]}}),
    generate_pb2.GenerateRequest(text="hi", stop={"strings": ["stop"]}, model=CANARY),
]


async def test_no_text_of_a_client_is_ever_logged(stack: Stack, capfd: pytest.CaptureFixture[str]):
    """At the least level, in both forms, good and bad requests of every method, in metadata too."""
    labels = {"labels": ["yes", "no"], "context_length": 64}
    stack.registry.declare("judge")
    stack.registry.set_serving("judge", fake_model("judge", {Capability.CLASSIFY, Capability.RERANK}, **labels))
    metadata = (("authorization", f"Bearer {CANARY}"), ("x-request-id", f" {CANARY} {CANARY} "), ("x-other", CANARY))
    with Log().kept() as log:
        for request in [*TEXTS, *(marked(bad) for bad, _, _ in BAD_GENERATE), *map(marked, TEXTS)]:
            await ended(stack.generate.Generate(request, metadata=metadata))
            await ended(stack.generate.GenerateStream(request, metadata=metadata))
        for request in [EMBED, marked(EMBED), *(marked(bad) for bad, _, _ in BAD_EMBED)]:
            await ended(stack.embed.Embed(request, metadata=metadata))
            await ended(stack.embed.EmbedStream(iter([request]), metadata=metadata))
        for request in (marked(bad) for bad, _, _ in BAD_SCORE):
            await ended(stack.score.Score(request, metadata=metadata))
        for text in (CANARY, CANARY * 100, " "):
            ranking = {"query": CANARY, "documents": [text, CANARY], "instruction": CANARY}
            await ended(stack.score.Rerank(score_pb2.RerankRequest(model="judge", **ranking)))
            inputs = [{"text": text}, {"text": CANARY}]
            await ended(stack.score.Classify(score_pb2.ClassifyRequest(model="judge", inputs=inputs)))
            await ended(stack.models.Tokenize(model_pb2.TokenizeRequest(model="decoder", text=text)))
            await ended(stack.models.Detokenize(model_pb2.DetokenizeRequest(model=text, token_ids=[1])))
            await ended(stack.models.GetModel(model_pb2.GetModelRequest(model=text)))
            await ended(stack.health.Check(health_pb2.HealthCheckRequest(service=text)))
            await ended(stack.channel.unary_unary(f"/{CANARY}/Get")(text.encode()))
            await ended(stack.channel.unary_unary("/pyruntime.v1.EmbedService/Embed")(text.encode()))
    assert len(log.calls) > 250
    for place, line in enumerate(log.lines):
        assert CANARY not in str(line), f"line {place}: {line['logger']} {line['message']}"
    printed = capfd.readouterr()
    assert CANARY not in log.raw + printed.out + printed.err


async def test_nor_are_tokens(tmp_path: Path):
    tokens = tmp_path / "tokens"
    tokens.write_text(f"{CANARY}-of-a-client-that-is-long-enough\n")
    tokens.chmod(0o600)
    with Log().kept() as log:
        async with call_site(Settings(port=0, token_file=str(tokens))) as (stack, _):
            for token in (
                "",
                f"Bearer {CANARY}",
                f"Basic {CANARY}",
                f"Bearer {CANARY}-of-a-client-that-is-long-enough",
            ):
                await ended(stack.embed.Embed(EMBED, metadata=(("authorization", token), ("x-request-id", "mine"))))
    assert [(line["code"], line["request_id"]) for line in log.calls] == [("UNAUTHENTICATED", "mine")] * 3 + [
        ("OK", "mine")
    ]
    assert all(line["reason"] for line in log.calls[:3])
    assert CANARY not in log.raw


async def test_nor_what_an_exception_quotes(stack: Stack, capfd: pytest.CaptureFixture[str]):
    """Wherever it comes from: an engine, a chained cause, a task that nobody awaits."""
    try:
        try:
            raise KeyError(CANARY)
        except KeyError as cause:
            raise ValueError(f"{CANARY} again") from cause
    except ValueError as error:
        stack.engine.refusal = error
    with Log().kept() as log:
        await ended(stack.embed.Embed(EMBED))
        await ended(stack.generate.GenerateStream(generate_pb2.GenerateRequest(model="decoder", text="hi")))
    stacks = [line["stack"] for line in log.lines if "stack" in line]
    assert len(stacks) == 2
    assert all(re.search(r"builtins.KeyError\n.*builtins.ValueError$", each, re.DOTALL) for each in stacks)
    assert CANARY not in log.raw + capfd.readouterr().err


async def test_texts_are_logged_when_asked_for():
    settings = SETTINGS.model_copy(update={"log_texts": True})
    with Log().kept(log_texts=True) as log:
        async with call_site(settings) as (stack, _):
            await stack.embed.Embed(embed_pb2.EmbedRequest(inputs=[{"text": CANARY}]))
            await ended(stack.embed.Embed(embed_pb2.EmbedRequest(inputs=[{"text": CANARY}], max_tokens=0)))
            await ended(stack.embed.Embed(embed_pb2.EmbedRequest(inputs=[{"text": "x" * 20_000}])))
    good, bad, large = log.calls
    assert CANARY in good["request"]
    assert "max_tokens" in bad["error"]
    assert re.fullmatch(r"\d+ bytes", large["request"])


async def test_a_task_that_nobody_awaited_is_told_without_its_message(caplog):
    from pyruntime.telemetry.logs import log_loop_errors

    loop = asyncio.get_running_loop()
    log_loop_errors(loop)

    async def fail() -> None:
        raise ValueError(CANARY)

    with Log().kept() as log:
        task = asyncio.create_task(fail())
        await asyncio.wait([task])
        del task
        import gc

        gc.collect()
    loop.set_exception_handler(None)
    (line,) = [each for each in log.lines if each["logger"] == "pyruntime"]
    assert line["message"] == "Task exception was never retrieved"
    assert line["stack"].endswith("builtins.ValueError")
    assert CANARY not in log.raw
