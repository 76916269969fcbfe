"""The way of a stream's messages to its client: packed, held to a time, and without a turn of the task for each one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import grpc

from pyruntime.service.stalls import Stalls
from pyruntime.service.validate import Pack


class Feed(Protocol):
    """Where messages come from. Used on one event loop."""

    def listen(self, on_more: Callable[[], None]) -> None:
        """From now on ``on_more`` is called when ``take`` may have more to give."""
        ...

    def take(self) -> Any | None:
        """The next message; None while there is none, and at a rest. Raises what ends the stream."""
        ...

    @property
    def rests(self) -> bool:
        """``take`` gives nothing more until somebody else has done something, or ever."""
        ...


class Outlet:
    """Given to handlers that are coroutines in place of the call's context, which is ``call``.

    Sending a message takes two turns of the event loop, one that starts it and one that is told of its end. A task that
    waits for both, through the coroutines and generators of every layer, spends most of its time on waking up: ``pour``
    does the same in plain calls.
    """

    def __init__(self, context: grpc.aio.ServicerContext, pack: Pack, stalls: Stalls) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.call = context
        self._pack = pack
        self._stalls = stalls
        self._task = task

    async def write(self, message: Any) -> None:
        raw = self._pack(message)
        self._stalls.begin(self._task, len(raw))
        try:
            await self.call.write(raw)
        finally:
            self._stalls.end(self._task)

    async def pour(self, feed: Feed) -> None:
        """Write what the feed gives until it rests. Raises what it raises, and what ``write`` does."""
        pouring = _Pouring(self.call, self._pack, self._stalls, self._task, feed)
        try:
            feed.listen(pouring.go_on)
            pouring.go_on()
            await pouring.ended
        finally:
            self._stalls.end(self._task)
            if not (pouring.ended.cancel() or pouring.ended.cancelled()):
                pouring.ended.exception()  # has been looked at, also where a cancelled task is not told


class _Pouring:
    """One ``Outlet.pour``, of which one message is on its way at a time."""

    def __init__(self, context: Any, pack: Pack, stalls: Stalls, task: asyncio.Task[Any], feed: Feed) -> None:
        self.ended: asyncio.Future[None] = task.get_loop().create_future()
        self._write = context.write
        self._pack = pack
        self._stalls = stalls
        self._task = task
        self._feed = feed
        self._writing: Coroutine[Any, Any, None] | None = None

    def go_on(self) -> None:
        """Send what there is, unless that waits for the message before it."""
        try:
            while self._writing is None and not self.ended.done():
                message = self._feed.take()
                if message is not None:
                    self._begin(self._pack(message))
                elif self._feed.rests:
                    self.ended.set_result(None)
                else:
                    return
        except Exception as error:
            self.ended.set_exception(error)

    def _begin(self, raw: bytes) -> None:
        writing = self._write(raw)
        if self._waits(writing):
            self._stalls.begin(self._task, len(raw))

    def _waits(self, writing: Coroutine[Any, Any, None]) -> bool:
        """Runs the write on, as a task would, and says whether it has come to wait: then it runs on by itself."""
        self._writing = None
        try:
            awaited: asyncio.Future[Any] | None = writing.send(None)
        except StopIteration:
            return False
        self._writing = writing
        if awaited is None:  # it gave way to others, as asyncio.sleep(0) does
            self._task.get_loop().call_soon(self._told)
        else:
            awaited._asyncio_future_blocking = False  # as who waits for a future says that he does
            awaited.add_done_callback(self._told)
        return True

    def _told(self, _: asyncio.Future[Any] | None = None) -> None:
        """The message has gone, or cannot go. Also after a ``pour`` that was broken off, for grpc frees it only now."""
        assert self._writing is not None
        try:
            if self._waits(self._writing):
                return
        except asyncio.CancelledError:
            self.ended.cancel()
        except Exception as error:
            if not self.ended.done():
                self.ended.set_exception(error)
        if not self.ended.done():
            self._stalls.end(self._task)
            self.go_on()
