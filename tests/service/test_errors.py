"""Each row of the error table, through a real channel, with its google.rpc details."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from pyruntime.errors import ComputeFault, Overloaded
from pyruntime.service.interceptor import ErrorInterceptor
from pyruntime.types import Capability
from pyruntime.v1 import embed_pb2, model_pb2
from tests.fakes import fake_model, play
from tests.service.bad_requests import (
    BAD_EMBED,
    BAD_GENERATE,
    BAD_SCORE,
    PACKED,
    A,
    Input,
    embed,
    generate,
    packed,
    score,
)
from tests.service.conftest import SETTINGS, Stack, failure_of

Code = grpc.StatusCode


@pytest.mark.parametrize(("request_", "field", "problem"), BAD_GENERATE)
async def test_bad_generate_fields_are_named(stack: Stack, request_, field, problem):
    for call in (stack.generate.Generate(request_), stack.generate.GenerateStream(request_)):
        failure = await failure_of(call)
        assert failure.code is Code.INVALID_ARGUMENT
        assert failure.reason == "INVALID_FIELD"
        assert list(failure.violations) == [field]
        assert problem in failure.violations[field]
    assert stack.engine.generated == []


@pytest.mark.parametrize(("request_", "field", "problem"), BAD_EMBED)
async def test_bad_embed_fields_are_named(stack: Stack, request_, field, problem):
    failure = await failure_of(stack.embed.Embed(request_))
    assert failure.code is Code.INVALID_ARGUMENT
    assert problem in failure.violations[field]
    assert stack.engine.embedded == []


@pytest.mark.parametrize(("request_", "field", "problem"), BAD_SCORE)
async def test_bad_score_fields_are_named(stack: Stack, request_, field, problem):
    failure = await failure_of(stack.score.Score(request_))
    assert failure.code is Code.INVALID_ARGUMENT
    assert problem in failure.violations[field]
    assert stack.engine.scored == []


async def test_every_bad_input_of_a_refused_request_is_named(stack: Stack):
    failure = await failure_of(stack.embed.Embed(embed(inputs=[Input(), Input(text=" ")])))
    assert set(failure.violations) == {"inputs[0]", "inputs[1].text"}


@pytest.mark.parametrize("name", ["n" * 50_000, "日" * 30_000, "%\n" * 30_000])
async def test_a_huge_refusal_still_fits_the_trailers(stack: Stack, name: str):
    failure = await failure_of(stack.models.GetModel(model_pb2.GetModelRequest(model=name)))
    assert failure.code is Code.NOT_FOUND
    assert len(failure.message.encode()) <= 500


async def test_unknown_names(stack: Stack):
    failure = await failure_of(stack.generate.Generate(generate(model="nobody")))
    assert (failure.code, failure.reason) == (Code.NOT_FOUND, "NOT_FOUND")
    assert "decoder, encoder" in failure.message
    failure = await failure_of(stack.embed.Embed(embed(prompt_name="nothing")))
    assert failure.code is Code.NOT_FOUND
    assert "query" in failure.message


async def test_missing_capability(stack: Stack):
    failure = await failure_of(stack.generate.Generate(generate(model="encoder")))
    assert (failure.code, failure.reason) == (Code.FAILED_PRECONDITION, "CAPABILITY_MISSING")
    assert "EMBED" in failure.message


async def test_empty_model_name(stack: Stack):
    assert (await stack.generate.Generate(generate())).model == "decoder"
    failure = await failure_of(stack.embed.Embed(embed(model="")))
    assert failure.code is Code.INVALID_ARGUMENT
    assert "decoder, encoder" in failure.violations["model"]


async def test_full_queue(stack: Stack):
    stack.engine.refusal = Overloaded("full", retry_after_s=2.5)
    for call in (stack.generate.Generate(generate()), stack.embed.Embed(embed()), stack.score.Score(score())):
        failure = await failure_of(call)
        assert (failure.code, failure.reason, failure.retry_s) == (Code.RESOURCE_EXHAUSTED, "OVERLOADED", 2.5)


async def test_loading_and_failed_models(bare: Stack):
    bare.registry.declare("decoder")
    for name in ("decoder", ""):
        failure = await failure_of(bare.generate.Generate(generate(model=name)))
        assert (failure.code, failure.reason) == (Code.UNAVAILABLE, "NOT_READY")
        assert failure.retry_s > 0
    bare.registry.set_failed("decoder", "weights are torn")
    failure = await failure_of(bare.generate.Generate(generate(model="decoder")))
    assert (failure.code, failure.reason) == (Code.FAILED_PRECONDITION, "MODEL_FAILED")
    assert "weights are torn" in failure.message


async def test_compute_fault_and_unexpected_error(stack: Stack):
    stack.engine.refusal = ComputeFault("not finite")
    failure = await failure_of(stack.generate.Generate(generate()))
    assert (failure.code, failure.reason) == (Code.INTERNAL, "COMPUTE_FAULT")
    stack.engine.refusal = RuntimeError("secret path /root")
    for call in (stack.generate.Generate(generate()), stack.generate.GenerateStream(generate())):
        failure = await failure_of(call)
        assert (failure.code, failure.message) == (Code.INTERNAL, "internal error")


async def test_message_over_the_limit(stack: Stack):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.embed.Embed(embed(inputs=[Input(text="a" * 200_000)]))
    assert caught.value.code() is Code.RESOURCE_EXHAUSTED


async def test_a_response_that_would_be_too_large_is_refused_before_the_work(stack: Stack):
    wide = fake_model("wide", {Capability.EMBED}, embedding_dimensions=4000)
    stack.registry.declare("wide")
    stack.registry.set_serving("wide", wide)
    request = embed(model="wide", inputs=[A] * 7)
    failure = await failure_of(stack.embed.Embed(request))
    assert failure.code is Code.INVALID_ARGUMENT
    assert "7 vectors make a response of 112" in failure.violations["inputs"]
    assert "allowed: at most 100000 (max_message_bytes)" in failure.violations["inputs"]
    assert wide.engine.embedded == []
    request.encoding = embed_pb2.ENCODING_FLOAT16_LE
    assert (await stack.embed.Embed(request)).ByteSize() < 100_000
    request.ClearField("encoding")
    request.dimensions = 3000
    assert len((await stack.embed.Embed(request)).results) == 7


async def test_scores_too_many_for_a_message(stack: Stack):
    settings = {"max_message_bytes": 1024, "max_scores_per_request": 2**20, "max_labels_per_request": 4096}
    stack.server._room.settings = SETTINGS.model_copy(update=settings)
    for request, field in (
        (score(label_token_ids=[1] * 300, labels=[]), "items"),
        (score(**PACKED, query=packed(1, 9, 2, 9), label_token_ids=[1] * 300, labels=[]), "query.token_ids"),
    ):
        failure = await failure_of(stack.score.Score(request))
        assert "1 results make a response of 1" in failure.violations[field]
    assert stack.engine.scored == []


@pytest.mark.parametrize("streaming", [False, True])
async def test_an_answer_that_turns_out_too_large_has_a_status_and_no_traceback(stack: Stack, caplog, streaming):
    stack.engine.next_stream = play("x" * 1000, n=100, per_wakeup=1000)
    stack.server._interceptor._max_message_bytes = 100_000 if not streaming else 1500
    call = (stack.generate.GenerateStream if streaming else stack.generate.Generate)(generate(n=100))
    failure = await failure_of(call)
    assert (failure.code, failure.reason) == (Code.RESOURCE_EXHAUSTED, "RESPONSE_TOO_LARGE")
    assert "max_message_bytes" in failure.message
    assert "Traceback" not in caplog.text


async def test_a_broken_engine_takes_its_model_out_of_service(stack: Stack):
    stack.registry.set_failed("decoder", "the engine of model decoder has failed")
    failure = await failure_of(stack.generate.Generate(generate(model="decoder")))
    assert failure.code is Code.FAILED_PRECONDITION
    assert failure.message == "model 'decoder' is not served: the engine of model decoder has failed"


async def test_deadline_stops_the_work(stack: Stack):
    stack.engine.block = True
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.embed.Embed(embed(), timeout=0.2)
    assert caught.value.code() is Code.DEADLINE_EXCEEDED
    await asyncio.wait_for(stack.engine.unblocked.wait(), 5)


async def test_client_that_goes_away_stops_the_work(stack: Stack):
    stack.engine.block = True
    call = stack.score.Score(score())
    await asyncio.wait_for(stack.engine.blocked.wait(), 5)
    call.cancel()
    await asyncio.wait_for(stack.engine.unblocked.wait(), 5)


async def test_many_bad_inputs_still_fit_the_trailers(stack: Stack):
    labels = ["日" * 100] * 8
    failure = await failure_of(stack.score.Score(score(items=[Input(text="日" * 30)] * 8)))
    assert set(failure.violations) == {f"items[{i}]" for i in range(8)}
    failure = await failure_of(stack.score.Score(score(labels=labels)))
    assert list(failure.violations) == ["labels[0]"]


async def test_a_call_whose_deadline_has_passed_is_not_begun():
    begun, aborted = [], []

    class Context:
        def time_remaining(self) -> float:
            return 0.0

        def trailing_metadata(self) -> tuple:
            return ()

        async def abort(self, code: grpc.StatusCode, message: str, metadata: tuple) -> None:
            aborted.append(code)
            raise grpc.aio.AbortError

    async def method(request, context) -> None:
        begun.append(request)

    with pytest.raises(grpc.aio.AbortError):
        await ErrorInterceptor(1000)._unary(method, bytes, counts=True)(None, Context())
    assert (begun, aborted) == ([], [Code.DEADLINE_EXCEEDED])
