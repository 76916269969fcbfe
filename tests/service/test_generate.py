"""Generate and GenerateStream: text, stop strings, usage, cancellation."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from pyruntime.registry import GenerationDefaults
from pyruntime.types import FinishReason, TokenEvent
from pyruntime.v1 import common_pb2, generate_pb2
from tests.fakes import BOS, EOS, MARK, FakeStream, play
from tests.service.conftest import Stack, failure_of

STOP = generate_pb2.FINISH_REASON_STOP
LENGTH = generate_pb2.FINISH_REASON_LENGTH


def request(n: int = 1, **stop) -> generate_pb2.GenerateRequest:
    return generate_pb2.GenerateRequest(text="hi", n=n, stop=generate_pb2.Stop(**stop))


async def unary(stack: Stack, stream: FakeStream, req: generate_pb2.GenerateRequest) -> generate_pb2.GenerateResponse:
    stack.engine.next_stream = stream
    return await stack.generate.Generate(req)


async def chunks(stack: Stack, stream: FakeStream, req) -> list[generate_pb2.GenerateChunk]:
    stack.engine.next_stream = stream
    return [chunk async for chunk in stack.generate.GenerateStream(req)]


def joined(received: list[generate_pb2.GenerateChunk], index: int) -> generate_pb2.Completion:
    own = [chunk for chunk in received if chunk.index == index]
    assert [chunk.finish_reason != 0 for chunk in own] == [False] * (len(own) - 1) + [True]
    return generate_pb2.Completion(
        index=index,
        text="".join(chunk.text for chunk in own),
        token_ids=[token for chunk in own for token in chunk.token_ids],
        finish_reason=own[-1].finish_reason,
        matched_stop=own[-1].matched_stop,
    )


TEXTS = ["plain", "straße → 日本語 👩‍🔬", "a\nEND", "xEN.END", "ENEND rest"]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("per_wakeup", [1, 2, 7])
@pytest.mark.parametrize("include", [False, True])
async def test_stream_equals_unary(stack: Stack, text: str, per_wakeup: int, include: bool):
    req = request(n=2, strings=["END", "\nEND"], include_stop_in_text=include)

    def new() -> FakeStream:
        return play(text, n=2, per_wakeup=per_wakeup)

    whole = await unary(stack, new(), req)
    received = await chunks(stack, new(), req)
    assert [joined(received, index) for index in range(2)] == list(whole.completions)
    assert [chunk.HasField("usage") for chunk in received] == [False] * (len(received) - 1) + [True]
    assert received[-1].usage == whole.usage
    assert received[-1].HasField("timing")
    before, found, _ = text.partition("END")
    expected = before.removesuffix("\n") if found and not include else before + found
    assert whole.completions[0].text == expected


@pytest.mark.parametrize("per_wakeup", [1, 3, 50])
async def test_stop_string_straddles_tokens_and_ends_the_engines_work(stack: Stack, per_wakeup: int):
    stream = play("one two STOP and on and on", per_wakeup=per_wakeup)
    answer = await unary(stack, stream, request(strings=["STOP"]))
    (completion,) = answer.completions
    assert (completion.text, completion.finish_reason, completion.matched_stop) == ("one two ", STOP, "STOP")
    # Tokens up to and including the one that completed the stop string, however many came in the same wake-up.
    assert bytes(completion.token_ids) == b"one two STOP"
    assert answer.usage.completion_tokens == 12
    assert 0 in stream.cancelled


async def test_one_continuation_stops_while_the_other_goes_on(stack: Stack):
    stop_bytes, other = b"a!zzzz", b"bcdefg"
    wakeups = [
        [TokenEvent(0, stop_bytes[i]), TokenEvent(1, other[i], FinishReason.LENGTH if i == 5 else None)]
        for i in range(6)
    ]
    stream = FakeStream(wakeups)
    answer = await unary(stack, stream, request(n=2, strings=["!"]))
    assert [completion.text for completion in answer.completions] == ["a", "bcdefg"]
    assert [completion.finish_reason for completion in answer.completions] == [STOP, LENGTH]
    assert answer.usage.completion_tokens == 2 + 6
    assert stream.cancelled[0] == 0


async def test_text_held_back_for_a_stop_string_comes_out_in_the_end(stack: Stack):
    received = await chunks(stack, play("so EN"), request(strings=["END"]))
    assert [chunk.text for chunk in received] == ["s", "o", " ", "", "EN"]
    assert joined(received, 0).matched_stop == ""


async def test_chunks_never_split_a_code_point(stack: Stack):
    received = await chunks(stack, play("日é"), request())
    assert [chunk.text for chunk in received] == ["", "", "日", "", "é"]
    assert [len(chunk.token_ids) for chunk in received] == [1] * 5


async def test_end_of_sequence_is_a_token_but_not_text(stack: Stack):
    answer = await unary(stack, play("ok", end=EOS), request())
    (completion,) = answer.completions
    assert (completion.text, completion.matched_stop, completion.finish_reason) == ("ok", "", STOP)
    assert list(completion.token_ids) == [*b"ok", EOS]
    assert answer.usage.completion_tokens == 3


@pytest.mark.parametrize(("include", "text"), [(False, "ok"), (True, "ok<mark>")])
async def test_stop_token(stack: Stack, include: bool, text: str):
    answer = await unary(stack, play("ok", end=MARK), request(token_ids=[MARK], include_stop_in_text=include))
    (completion,) = answer.completions
    assert (completion.text, completion.matched_stop) == (text, "<mark>")
    assert stack.engine.generated[0].stop.token_ids == {EOS, MARK}


async def test_stop_strings_wait_for_min_new_tokens(stack: Stack):
    answer = await unary(stack, play("a.b.c.d"), request(strings=["."], min_new_tokens=3))
    assert answer.completions[0].text == "a.b"


async def test_what_the_engine_is_asked(stack: Stack):
    req = generate_pb2.GenerateRequest(
        text="hi",
        n=3,
        priority=-2,
        request_id="r1",
        sampling=generate_pb2.Sampling(temperature=0.5, top_k=-1, seed=2**64 - 1),
        stop=generate_pb2.Stop(max_new_tokens=5, min_new_tokens=2, ignore_eos=True),
    )
    await unary(stack, play("x", n=3), req)
    (job,) = stack.engine.generated
    assert (job.prompt, job.n, job.priority, job.request_id) == ([BOS, *b"hi"], 3, -2, "r1")
    sampling = job.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 0, 1.0, 0.0)
    assert sampling.seed == 2**64 - 1
    assert (job.stop.max_new_tokens, job.stop.min_new_tokens, job.stop.token_ids) == (5, 2, frozenset())


async def test_unset_fields_take_the_models_values(stack: Stack):
    stack.decoder.generation_defaults = GenerationDefaults(temperature=0.7, top_k=40, top_p=0.9, min_p=0.1)
    await stack.generate.Generate(generate_pb2.GenerateRequest(token_ids=common_pb2.TokenIds(ids=[7])))
    await stack.generate.Generate(generate_pb2.GenerateRequest(token_ids=common_pb2.TokenIds(ids=[7])))
    first, second = stack.engine.generated
    sampling = first.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.7, 40, 0.9, 0.1)
    assert first.sampling.seed != second.sampling.seed
    assert (first.prompt, first.stop.max_new_tokens) == ([7], 63)
    # Without ids of its own configuration, the model ends at the tokenizer's.
    assert first.stop.token_ids == {EOS}


async def test_chat_goes_through_the_template(stack: Stack):
    messages = [{"role": "user", "content": "yo"}]
    await stack.generate.Generate(generate_pb2.GenerateRequest(chat=generate_pb2.Chat(messages=messages)))
    chat = generate_pb2.Chat(messages=messages, template_arguments={"mood": "glad"})
    await stack.generate.Generate(generate_pb2.GenerateRequest(chat=chat))
    chat.add_generation_prompt = False
    await stack.generate.Generate(generate_pb2.GenerateRequest(chat=chat))
    # The template writes <s> itself: it must not come twice.
    expected = [b"user: yo\nbot:", b"user: yo\nbot:glad", b"user: yo\n"]
    assert [job.prompt for job in stack.engine.generated] == [[BOS, *text] for text in expected]


async def test_chat_without_a_template(stack: Stack):
    stack.decoder.tokenizer._hf.chat_template = None
    chat = generate_pb2.Chat(messages=[{"role": "user", "content": "yo"}])
    failure = await failure_of(stack.generate.Generate(generate_pb2.GenerateRequest(chat=chat)))
    assert failure.code is grpc.StatusCode.FAILED_PRECONDITION


async def test_usage_and_timing(stack: Stack):
    answer = await unary(stack, play("abc", n=2, cached=2), request(n=2))
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.cached_tokens) == (3, 6, 2)
    assert answer.timing.queue.ToTimedelta().total_seconds() == 0.25
    assert answer.timing.compute.ToTimedelta().total_seconds() == 0.5
    assert answer.timing.total.ToNanoseconds() >= answer.timing.tokenize.ToNanoseconds() > 0


async def test_cancelling_a_stream_stops_the_engine(stack: Stack):
    stream = play("abcdef")
    stream.hold = 3
    stack.engine.next_stream = stream
    call = stack.generate.GenerateStream(request())
    assert (await call.read()).text == "a"
    call.cancel()
    await asyncio.wait_for(stream.stopped.wait(), 5)
    assert None in stream.cancelled


@pytest.mark.parametrize("streaming", [False, True])
async def test_deadline_stops_the_engine(stack: Stack, streaming: bool):
    stream = play("abcdef")
    stream.hold = 3
    stack.engine.next_stream = stream
    call = stack.generate.GenerateStream if streaming else stack.generate.Generate
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        if streaming:
            async for _ in call(request(), timeout=0.2):
                pass
        else:
            await call(request(), timeout=0.2)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await asyncio.wait_for(stream.stopped.wait(), 5)


async def test_failure_in_the_middle_of_a_stream(stack: Stack):
    from pyruntime.errors import ComputeFault

    stream = FakeStream([[TokenEvent(0, ord("a"))]], error=ComputeFault("not finite"))
    stack.engine.next_stream = stream
    call = stack.generate.GenerateStream(request())
    assert (await call.read()).text == "a"
    assert (await failure_of(call)).reason == "COMPUTE_FAULT"
