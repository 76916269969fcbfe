"""Request messages as they come over the wire: decompressed within bounds, and parsed without raising.

grpc would decompress a message whole before it looks at its size, so that a megabyte can become a gigabyte. It is told
not to (``COMPRESSION_OPTIONS``) and hands messages on as they are. One that is compressed is known by its first byte,
which in a protobuf message is a tag: the 0x1f of gzip would be a tag of wire type 7, which there is none of.
"""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from google.protobuf.message import DecodeError

from pyruntime.errors import MalformedMessage, PyruntimeError, RequestTooLarge
from pyruntime.service.field_budget import check_fields, children_of

GZIP = b"\x1f\x8b"
# Identity and gzip, by their bits. Not deflate, of which a message cannot be told from one that is not compressed.
COMPRESSION_OPTIONS = [("grpc.per_message_decompression", 0), ("grpc.compression_enabled_algorithms_bitset", 0b101)]
# What gzip may make of a message: so much whatever its size, or so many times its size if that is more.
UNPACKED_BYTES = 2**22
MAX_RATIO = 32
_GZIP_WINDOW = 16 + zlib.MAX_WBITS


class BadMessage:
    """In the place of a message, since whatever a deserializer raises becomes UNKNOWN and a stack in the log."""

    def __init__(self, error: PyruntimeError) -> None:
        self.error = error


def reader(parse: Callable[[bytes], Any], max_bytes: int) -> Callable[[bytes], Any]:
    """A deserializer that gives what ``parse``, a message type's ``FromString``, gives; or a ``BadMessage``."""
    children = children_of(parse.__self__.DESCRIPTOR)  # type: ignore[attr-defined]

    def read(raw: bytes) -> Any:
        try:
            message = gunzip(raw, max_bytes) if raw[:2] == GZIP else raw
            check_fields(message, children)
            return parse(message)
        except DecodeError:
            return BadMessage(MalformedMessage("the request is no message of this method's type"))
        except PyruntimeError as error:
            return BadMessage(error)

    return read


def gunzip(raw: bytes, max_bytes: int) -> bytes:
    """One gzip member. Raises ``RequestTooLarge`` above ``max_bytes``, of which it makes no more than one.

    What is small may only become ``UNPACKED_BYTES`` or ``MAX_RATIO`` times as large: a few packed bytes must not cost
    the event loop as much time as a message of the largest size.
    """
    max_bytes = min(max_bytes, max(UNPACKED_BYTES, MAX_RATIO * len(raw)))
    stream = zlib.decompressobj(_GZIP_WINDOW)
    try:
        data = stream.decompress(raw, max_bytes + 1)
    except zlib.error as error:
        raise MalformedMessage("the request is not whole gzip") from error
    if len(data) > max_bytes:
        limit = f"{MAX_RATIO} times its size or {UNPACKED_BYTES}, and at most max_message_bytes"
        raise RequestTooLarge(f"the request has more than {max_bytes} bytes once decompressed; allowed: {limit}")
    if not stream.eof or stream.unused_data:
        raise MalformedMessage("the request is not whole gzip")
    return data


def checked(request: Any) -> Any:
    """The message, or of a stream of them an iterator. Raises the error of a bad one."""
    if isinstance(request, BadMessage):
        raise request.error
    return _Checked(request) if hasattr(request, "__aiter__") else request


class _Checked:
    """Not a generator, which would end at the first cancelled wait for a message."""

    def __init__(self, messages: AsyncIterator[Any]) -> None:
        self._messages = aiter(messages)

    def __aiter__(self) -> _Checked:
        return self

    async def __anext__(self) -> Any:
        return checked(await anext(self._messages))
