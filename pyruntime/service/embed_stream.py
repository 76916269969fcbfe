"""What EmbedStream needs beside Embed: order, a bound on what is in flight, and patience."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from pyruntime.errors import Overloaded
from pyruntime.registry import ModelRegistry, shutting_down

T = TypeVar("T")
R = TypeVar("R")

# Requests of one stream that are being worked on, or whose answer the client has not taken yet. So many keep the batch
# full while others are tokenised and sent; each may be as large as a message is.
MAX_IN_FLIGHT = 8
# A full queue is tried again after the time that the error tells, but not later than this.
LONGEST_PAUSE_S = 1.0


async def in_order(
    items: AsyncIterator[T], work: Callable[[T], Awaitable[R]], most: int = MAX_IN_FLIGHT
) -> AsyncGenerator[R, None]:
    """``work`` of each item, in the items' order, ``most`` of them at a time.

    An item is asked for only when fewer than ``most`` are begun or wait to be taken: a consumer that stops holds up the
    producer. An error, of an item's work or of ``items``, comes behind the results of the items before it, and ends the
    rest; so does closing the generator.
    """
    room = asyncio.Semaphore(most)
    begun: asyncio.Queue[asyncio.Future[R] | None] = asyncio.Queue()
    running: set[asyncio.Future[Any]] = set()

    async def read() -> None:
        try:
            await room.acquire()
            async for item in items:
                task = asyncio.ensure_future(work(item))
                running.add(task)
                begun.put_nowait(task)
                await room.acquire()
        finally:
            begun.put_nowait(None)

    reader = asyncio.ensure_future(read())
    running.add(reader)
    try:
        while (task := await begun.get()) is not None:
            yield await task
            running.discard(task)
            room.release()
        await reader
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def until_draining(registry: ModelRegistry, items: AsyncIterator[T]) -> AsyncGenerator[T, None]:
    """The items, until the server shuts down: then ``NotReady``, so that an idle stream does not hold that up."""
    loop = asyncio.get_running_loop()
    draining = asyncio.Event()

    def look() -> None:  # on whichever thread changes the registry
        if registry.is_draining:
            loop.call_soon_threadsafe(draining.set)

    registry.add_listener(look)
    waiting = asyncio.ensure_future(draining.wait())
    try:
        look()
        while True:
            item = asyncio.ensure_future(anext(items, None))
            try:
                await asyncio.wait({item, waiting}, return_when=asyncio.FIRST_COMPLETED)
                if not item.done():
                    raise shutting_down()
            finally:
                item.cancel()
            if (found := item.result()) is None:
                return
            yield found
    finally:
        waiting.cancel()
        registry.remove_listener(look)


async def when_admitted(work: Callable[..., Awaitable[R]], *arguments: Any) -> R:
    """``work(*arguments)``, again and again while the queue is full: the stream waits, and with it its client."""
    while True:
        try:
            return await work(*arguments)
        except Overloaded as full:
            await asyncio.sleep(min(full.retry_after_s, LONGEST_PAUSE_S))
