"""What both clients share for work of many requests."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Sized
from dataclasses import replace
from itertools import islice
from numbers import Integral
from typing import Any, TypeVar

from pyruntime.client.errors import ApiError
from pyruntime.client.fields import shown
from pyruntime.client.messages import Embedding, check_is_list, each_embedding, good
from pyruntime.client.ranking import RankedDocument
from pyruntime.v1 import embed_pb2

T = TypeVar("T")
R = TypeVar("R")

# Texts in one request: large enough to fill the server's batches.
BATCH_SIZE = 64
# Requests sent and not answered yet: enough that the server always has one to compute.
IN_FLIGHT = 4


def batches(inputs: Iterable[T], size: int) -> Iterator[list[T]]:
    """Lists of ``size`` inputs, the last one shorter, taken as they are asked for. TypeError for a single text."""
    check_is_list(inputs, "inputs")
    remaining = iter(inputs)
    while batch := list(islice(remaining, _checked(size))):
        yield batch


def requests(batches: Iterable[list[T]], build: Callable[[list[T]], R]) -> Iterator[R]:
    """What ``build`` makes of each batch."""
    start = 0
    for batch in batches:
        with part_from(start):
            request = build(batch)
        yield request
        start += len(batch)


async def requests_of_either(batches: AsyncIterable[list[T]], build: Callable[[list[T]], R]) -> AsyncIterator[R]:
    """As ``requests``, of asynchronous batches."""
    start = 0
    async for batch in batches:
        with part_from(start):
            request = build(batch)
        yield request
        start += len(batch)


async def batches_of_either(inputs: Iterable[T] | AsyncIterable[T], size: int) -> AsyncIterator[list[T]]:
    """As ``batches``, of asynchronous inputs as well."""
    if not isinstance(inputs, AsyncIterable):
        for batch in batches(inputs, size):
            yield batch
        return
    collected: list[T] = []
    async for each in inputs:
        collected.append(each)
        if len(collected) >= _checked(size):
            yield collected
            collected = []
    if collected:
        yield collected


def results(response: embed_pb2.EmbedResponse, start: int, return_errors: bool) -> list[Embedding | ApiError]:
    """One entry an input, of which the first is number ``start``. Raises the first one's error unless
    ``return_errors``.
    """
    found = each_embedding(response)
    for each in found:
        if isinstance(each, ApiError):
            each.renumber(lambda place: start + place)
    return found if return_errors else list(good(found))


@contextlib.contextmanager
def progress_bar(inputs: object, shown: bool | None) -> Iterator[Any]:
    """A bar of the inputs that are done, on standard error; call its ``update``.

    ``shown``: None shows it where standard error is a terminal.
    """
    from tqdm import tqdm

    total = len(inputs) if isinstance(inputs, Sized) else None
    disable = None if shown is None else not shown
    with tqdm(total=total, unit=" inputs", disable=disable, file=sys.stderr) as bar:
        yield bar


@contextlib.contextmanager
def part_from(start: int) -> Iterator[None]:
    """Errors raised inside are told of all inputs, not of the part alone that begins with number ``start``."""
    try:
        yield
    except ApiError as error:
        error.renumber(lambda place: start + place)
        raise
    except (TypeError, ValueError) as error:
        if start:
            error.add_note(f"in the part that begins with input {start}, which is number 0 there")
        raise


def moved(ranked: Iterable[RankedDocument], start: int) -> list[RankedDocument]:
    """As documents of a list in which their first one is number ``start``."""
    return [replace(each, index=start + each.index) for each in ranked]


def best(ranked: Iterable[RankedDocument], top_n: int | None) -> list[RankedDocument]:
    """Highest score first, equal ones by index, as the server orders them."""
    return sorted(ranked, key=lambda each: (-each.score, each.index))[:top_n]


def _checked(size: int) -> int:
    if not isinstance(size, Integral):
        raise TypeError(f"batch_size must be a whole number, not {shown(size)}")
    if size < 1:
        raise ValueError(f"batch_size must be 1 or more, not {size}")
    return int(size)
