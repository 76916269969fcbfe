"""Outlet.pour: order, one message at a time, errors from either side, and what a cancelled call leaves behind."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import pytest

from pyruntime.service.outlet import Outlet
from pyruntime.service.stalls import Stalls


class Context:
    """Keeps each message until it is told that it has gone, as often as a message waits; it gives way before."""

    def __init__(self, waits: int = 1, gives_way: bool = False) -> None:
        self.waits, self.gives_way = waits, gives_way
        self.begun: list[bytes] = []
        self.ended: list[bytes] = []
        self.waiting: asyncio.Future[None] | None = None

    async def write(self, raw: bytes) -> None:
        assert self.waiting is None, "two at once"
        self.begun.append(raw)
        for _ in range(self.waits):
            if self.gives_way:
                await asyncio.sleep(0)
            self.waiting = asyncio.get_running_loop().create_future()
            await self.waiting
        self.ended.append(raw)

    def gone(self, error: Exception | None = None) -> None:
        waiting, self.waiting = self.waiting, None
        assert waiting is not None
        if error is not None:
            waiting.set_exception(error)
        else:
            waiting.set_result(None)


class Feed:
    def __init__(self) -> None:
        self.messages: deque[Any] = deque()
        self.rests = False
        self.on_more = lambda: None

    def listen(self, on_more) -> None:
        self.on_more = on_more

    def take(self) -> Any | None:
        message = self.messages.popleft() if self.messages else None
        if isinstance(message, Exception):
            raise message
        return message

    def put(self, *messages: Any) -> None:
        self.messages += messages
        self.on_more()


class Site:
    def __init__(self, stall_s: float = 0, waits: int = 1, gives_way: bool = False) -> None:
        self.context, self.feed, self.stalls = Context(waits, gives_way), Feed(), Stalls(stall_s)

        async def run() -> None:
            await Outlet(self.context, str.encode, self.stalls).pour(self.feed)

        self.task = asyncio.create_task(run())

    async def sent(self, count: int) -> None:
        """Lets the loop come round until so many messages have been given to gRPC."""
        while len(self.context.begun) < count:
            await asyncio.sleep(0)


async def test_messages_go_one_at_a_time_in_order():
    site = Site()
    site.feed.put("a", "b")
    await site.sent(1)
    site.feed.put("c")
    assert site.context.begun == [b"a"]
    for count in (2, 3):
        site.context.gone()
        await site.sent(count)
    site.context.gone()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not site.task.done()  # more may come
    site.feed.rests = True
    site.feed.on_more()
    await site.task
    assert site.context.ended == [b"a", b"b", b"c"]


@pytest.mark.parametrize("gives_way", [False, True])
async def test_a_message_may_wait_more_than_once(gives_way):
    site = Site(waits=3, gives_way=gives_way)
    site.feed.put("a", "b")
    site.feed.rests = True
    for message in (b"a", b"b"):
        for _ in range(3):
            while site.context.waiting is None:
                await asyncio.sleep(0)
            assert (site.context.begun[-1], len(site.context.ended)) == (message, len(site.context.begun) - 1)
            site.context.gone()
    await site.task
    assert site.context.ended == [b"a", b"b"]


async def test_an_error_behind_a_second_wait_ends_it():
    site = Site(waits=2)
    site.feed.put("a", "b")
    for error in (None, ConnectionError("gone")):
        while site.context.waiting is None:
            await asyncio.sleep(0)
        site.context.gone(error)
    with pytest.raises(ConnectionError):
        await site.task
    assert (site.context.begun, site.context.ended) == ([b"a"], [])


async def test_a_message_whose_end_is_cancelled_cancels_the_call(caplog):
    site = Site()
    site.feed.put("a")
    await site.sent(1)
    site.context.waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await site.task
    assert caplog.records == []


async def test_an_error_of_the_feed_comes_behind_what_was_before_it():
    site = Site()
    site.feed.put("a", ValueError("spoilt"))
    await site.sent(1)
    assert not site.task.done()
    site.context.gone()
    with pytest.raises(ValueError, match="spoilt"):
        await site.task
    assert site.context.ended == [b"a"]


async def test_an_error_of_the_connection_ends_it():
    site = Site()
    site.feed.put("a", "b")
    await site.sent(1)
    site.context.gone(ConnectionError("gone"))
    with pytest.raises(ConnectionError):
        await site.task
    site.feed.on_more()
    assert site.context.begun == [b"a"]


@pytest.mark.parametrize("error", [None, ConnectionError("gone")])
async def test_a_cancelled_call_sends_no_more_and_lets_its_last_message_end(error, caplog):
    site = Site()
    site.feed.put("a", "b")
    await site.sent(1)
    site.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await site.task
    site.context.gone(error)
    await asyncio.sleep(0)
    site.feed.on_more()
    assert (site.context.begun, site.context.ended) == ([b"a"], [] if error else [b"a"])
    assert caplog.records == []  # nothing was raised that nobody awaits


async def test_an_error_beside_a_cancellation_is_not_left_unseen(caplog):
    site = Site()
    site.feed.put("a")
    await site.sent(1)
    site.context.gone(ConnectionError("gone"))
    await asyncio.sleep(0)  # the message's end has been noticed, the task not woken yet
    site.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await site.task
    del site
    assert caplog.records == []


async def test_a_message_that_nobody_takes_cancels_the_call():
    site = Site(stall_s=0.01)
    site.feed.put("a")
    with pytest.raises(asyncio.CancelledError):
        await site.task
    assert site.stalls.take(site.task)


class Waits:
    """In the place of ``Stalls``: what begins and what ends."""

    def __init__(self) -> None:
        self.told: list[int | str] = []

    def begin(self, task: asyncio.Task[Any], num_bytes: int) -> None:
        self.told.append(num_bytes)

    def end(self, task: asyncio.Task[Any]) -> None:
        self.told.append("end")


async def test_a_client_is_waited_for_while_it_has_a_message_to_take_and_no_longer():
    """As long as a message takes that is as large as it is; not while the next one is still being made."""
    site = Site()
    site.stalls = waits = Waits()
    site.feed.put("a" * 5)
    await site.sent(1)
    assert waits.told == [5]
    site.context.gone()
    while not site.context.ended:
        await asyncio.sleep(0)
    assert waits.told == [5, "end"]
    site.feed.put("b" * 7)
    assert waits.told == [5, "end", 7]
    site.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await site.task
    assert waits.told == [5, "end", 7, "end"]
    site.context.gone()
    await asyncio.sleep(0)
    assert waits.told == [5, "end", 7, "end"]
