"""What both clients' ``embed_stream`` share."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from itertools import islice
from typing import TypeVar

from pyruntime.client.errors import ApiError
from pyruntime.client.messages import Embedding, check_is_list, each_embedding, good
from pyruntime.v1 import embed_pb2

T = TypeVar("T")

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


def results(response: embed_pb2.EmbedResponse, return_errors: bool) -> list[Embedding | ApiError]:
    """One entry an input. Raises the first input's error unless ``return_errors``."""
    found = each_embedding(response)
    return found if return_errors else list(good(found))


def _checked(size: int) -> int:
    if size < 1:
        raise ValueError(f"batch_size must be 1 or more, not {size}")
    return size
