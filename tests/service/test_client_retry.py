"""Which failed calls the clients send again, when, and under which name."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from pyruntime.client import NEVER, ApiError, AsyncClient, Client, Retry
from pyruntime.client.retry import Attempts
from pyruntime.errors import ComputeFault, NotReady, Overloaded, ResponseTooLarge
from pyruntime.v1 import embed_pb2
from tests.fakes import FakeStream, play
from tests.service.conftest import Stack

QUICK = Retry(attempts=3, first_wait_s=0.001, most_wait_s=0.002)
LOADING = ApiError("UNAVAILABLE", "loading", retry_after_s=2.0)
CUT = ApiError("UNAVAILABLE", "connection refused")
BAD = ApiError("INVALID_ARGUMENT", "text: is empty")


class Clock:
    """Time that passes when somebody waits."""

    def __init__(self, draw: float = 0.0) -> None:
        self.now = 100.0
        self.draw = draw

    def attempts(self, retry: Retry, timeout_s: float | None = None, **options) -> Attempts:
        return Attempts(retry, timeout_s, clock=lambda: self.now, draw=lambda: self.draw, **options)

    def waits(self, attempts: Attempts, error: ApiError) -> list[float]:
        """Until there are no more attempts; at most twenty."""
        waited: list[float] = []
        while len(waited) < 20:
            try:
                waited.append(attempts.wait_s(error))
            except ApiError as raised:
                assert raised is error
                break
            self.now += waited[-1]
        return waited


def test_waits_double_without_word_from_the_server_and_follow_it_else():
    retry = Retry(attempts=6, first_wait_s=0.5, most_wait_s=3)
    assert Clock().waits(Clock().attempts(retry), CUT) == [0.5, 1, 2, 3, 3]
    late = Clock(draw=1.0)
    assert late.waits(late.attempts(retry), CUT) == [0.25, 0.5, 1, 1.5, 1.5]
    assert Clock().waits(Clock().attempts(retry), LOADING) == [2.0] * 5
    assert late.waits(late.attempts(retry), LOADING) == [2.5] * 5
    at_once = ApiError("UNAVAILABLE", "", retry_after_s=0.0)
    assert all(wait_s > 0 for wait_s in Clock().waits(Clock().attempts(retry), at_once))


def test_attempts_end_by_count_by_time_and_before_the_deadline():
    clock = Clock()
    assert len(clock.waits(clock.attempts(Retry(attempts=20, total_s=7)), LOADING)) == 3
    assert len(clock.waits(clock.attempts(Retry(), timeout_s=3), LOADING)) == 1
    assert clock.waits(clock.attempts(NEVER), LOADING) == []
    attempts = clock.attempts(Retry(), timeout_s=3)
    clock.now += attempts.wait_s(LOADING)
    assert attempts.remaining_s() == 1
    clock.now += 5
    assert attempts.remaining_s() == 0
    assert clock.attempts(Retry()).remaining_s() is None


def test_bulk_work_counts_from_its_last_answer():
    clock = Clock()
    attempts = clock.attempts(Retry(patience_s=9, attempts=2), bulk=True)
    assert len(clock.waits(attempts, LOADING)) == 4
    attempts.answered()
    assert len(clock.waits(attempts, LOADING)) == 4
    assert clock.waits(clock.attempts(NEVER, bulk=True), LOADING) == []
    attempts = clock.attempts(Retry(patience_s=9, attempts=2), bulk=True, reached=False)
    assert len(clock.waits(attempts, LOADING)) == 1
    attempts.answered()
    assert len(clock.waits(attempts, LOADING)) == 4


@pytest.mark.parametrize("code", ["INVALID_ARGUMENT", "INTERNAL", "DEADLINE_EXCEEDED", "CANCELLED", "UNAUTHENTICATED"])
def test_what_would_fail_again_is_not_sent_again(code: str):
    for error in (ApiError(code, ""), ApiError(code, "", retry_after_s=1.0)):
        assert Clock().waits(Clock().attempts(Retry()), error) == []
    assert Clock().waits(Clock().attempts(Retry()), ApiError("RESOURCE_EXHAUSTED", "too large")) == []


@pytest.mark.parametrize("change", [{"attempts": 0}, {"total_s": -1}, {"patience_s": -0.1}])
def test_a_policy_that_makes_no_sense(change):
    with pytest.raises(ValueError, match="must be"):
        Retry(**change)


class Failing:
    """Lets a stack's generation fail in these ways, then succeed, then begin again; and counts."""

    def __init__(self, stack: Stack, *errors: Exception) -> None:
        self._generate, self._errors, self.num_calls = stack.engine.generate, errors, 0
        stack.engine.generate = self.generate  # type: ignore[method-assign]

    def generate(self, request, **options):
        turn = self.num_calls % (len(self._errors) + 1)
        self.num_calls += 1
        if turn < len(self._errors):
            raise self._errors[turn]
        return self._generate(request, **options)


async def both(stack: Stack, retry: Retry, streamed: bool) -> list:
    """What each client makes of a generation: its text or its error."""

    def work() -> object:
        with Client(stack.address, model="decoder", retry=retry) as client:
            try:
                return "".join(client.stream("a")) if streamed else client.generate("a")
            except ApiError as error:
                return error

    async def asynchronous() -> object:
        async with AsyncClient(stack.address, model="decoder", retry=retry) as client:
            try:
                return (
                    "".join([piece async for piece in client.stream("a")]) if streamed else await client.generate("a")
                )
            except ApiError as error:
                return error

    return [await asyncio.to_thread(work), await asynchronous()]


@pytest.mark.parametrize("streamed", [False, True])
async def test_calls_that_the_server_cannot_take_now_are_sent_again(stack: Stack, streamed: bool):
    failing = Failing(stack, NotReady("loading", 0.0), Overloaded("full", 0.001))
    assert await both(stack, QUICK, streamed) == ["ok", "ok"]
    assert failing.num_calls == 6


@pytest.mark.parametrize("streamed", [False, True])
async def test_each_failure_is_told_after_the_last_attempt(stack: Stack, streamed: bool):
    failing = Failing(stack, *[Overloaded("full", 0.0)] * 6)
    errors = await both(stack, QUICK, streamed)
    assert [(error.code, error.retry_after_s, len(error.request_id)) for error in errors] == [
        ("RESOURCE_EXHAUSTED", 0.0, 32)
    ] * 2
    assert failing.num_calls == 6
    failing = Failing(stack, ComputeFault("not finite"), ResponseTooLarge("large"))
    assert [error.code for error in await both(stack, QUICK, streamed)] == ["INTERNAL", "RESOURCE_EXHAUSTED"]
    assert failing.num_calls == 2


async def test_a_stream_is_not_begun_again_after_its_first_piece(stack: Stack):
    numbers = []

    def generate(request, **_) -> FakeStream:
        stream = play("abc")
        stream.wakeups.pop()  # the end
        stream.error = NotReady("draining", 0.0)
        numbers.append(stream)
        return stream

    stack.engine.generate = generate  # type: ignore[method-assign]
    errors = await both(stack, QUICK, streamed=True)
    assert [error.code for error in errors] == ["UNAVAILABLE"] * 2
    assert len(numbers) == 2


async def test_closing_wakes_who_waits_to_try_again(stack: Stack):
    failing = Failing(stack, *[NotReady("loading", 1000.0)] * 2)
    patient = Retry(total_s=10**6)
    client = AsyncClient(stack.address, model="decoder", retry=patient, timeout_s=10**6)
    task = asyncio.create_task(client.generate("a"))
    blocking = Client(stack.address, model="decoder", retry=patient, timeout_s=10**6)
    thread = asyncio.create_task(asyncio.to_thread(blocking.generate, "a"))
    while failing.num_calls < 2:
        await asyncio.sleep(0.01)
    await client.close()
    await asyncio.to_thread(blocking.close)
    for waiting in (task, thread):
        with pytest.raises(ApiError) as caught:
            await asyncio.wait_for(waiting, 5)
        assert caught.value.code == "CANCELLED"
    with pytest.raises(ApiError, match="the client is closed"):
        await client.models()
    with pytest.raises(ApiError, match="the client is closed"):
        blocking.models()


async def test_an_error_has_the_name_under_which_the_server_knows_the_call(stack: Stack):
    for given, expected in (("mine-1", "mine-1"), ("nöt ascii", None)):
        async with AsyncClient(stack.address, model="decoder") as client:
            with pytest.raises(ApiError) as caught:
                await client.generate(" ", request_id=given)
        assert caught.value.request_id == (expected or caught.value.request_id)
        assert len(caught.value.request_id) in (6, 32)
    with Client("127.0.0.1:1", retry=NEVER) as client, pytest.raises(ApiError) as caught:
        await asyncio.to_thread(client.models)
    assert (caught.value.code, len(caught.value.request_id)) == ("UNAVAILABLE", 32)


async def test_the_word_for_grpc_s_own_retries(stack: Stack):
    """They read no RetryInfo, but this trailer."""
    for error, expected in (
        (Overloaded("full", 0.0121), "13"),
        (NotReady("loading", 2.0), "2000"),
        (ResponseTooLarge("large"), "-1"),
        (ComputeFault("not finite"), None),
    ):
        stack.engine.refusal = error
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stack.embed.Embed(embed_pb2.EmbedRequest(model="decoder", inputs=[{"text": "a"}]))
        trailers = dict(caught.value.trailing_metadata())
        assert trailers.get("grpc-retry-pushback-ms") == expected
