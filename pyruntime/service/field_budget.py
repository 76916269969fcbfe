"""How many fields a message has, known before it is parsed.

A field of two bytes, such as an empty entry of a list, becomes an object of some fifty: 64 MiB of them would take
1.5 GB and hold up the event loop for seconds. Walking over the fields costs far less than that and stops early.
"""

from __future__ import annotations

from typing import Any

from pyruntime.errors import MalformedMessage, RequestTooLarge

# Of a message, those inside others included: far more than any request has that is not refused for its lists.
MAX_FIELDS = 2**17
# Whatever is in so few bytes is soon parsed.
SMALL_BYTES = 2**16
# As deep as the parser goes.
MAX_DEPTH = 100

# Of a message's fields that are messages themselves, by number, the same.
Children = dict[int, "Children"]
_known: dict[str, Children] = {}


def children_of(descriptor: Any) -> Children:
    """Of a message type; types may contain each other."""
    if descriptor.full_name not in _known:
        found = _known[descriptor.full_name] = {}
        for field in descriptor.fields:
            if field.message_type is not None:
                found[field.number] = children_of(field.message_type)
    return _known[descriptor.full_name]


def check_fields(raw: bytes, children: Children) -> None:
    """Raises ``RequestTooLarge`` above ``MAX_FIELDS``, ``MalformedMessage`` for what cannot be walked over."""
    if len(raw) <= SMALL_BYTES:
        return
    try:
        _walk(raw, 0, len(raw), children, MAX_FIELDS, MAX_DEPTH)
    except IndexError:
        raise MalformedMessage("the request is no message of this method's type") from None


def _walk(raw: bytes, place: int, end: int, children: Children, left: int, depth: int) -> int:
    """How many more fields there may be after those from ``place`` to ``end``."""
    while place < end:
        left -= 1
        if left < 0:
            raise RequestTooLarge(f"the request has more than {MAX_FIELDS} fields")
        tag, place = _varint(raw, place)
        kind = tag & 7
        if kind == 0:
            _, place = _varint(raw, place)
        elif kind == 2:
            length, place = _varint(raw, place)
            inside = children.get(tag >> 3)
            if inside is not None and depth and place + length <= end:
                left = _walk(raw, place, place + length, inside, left, depth - 1)
            place += length
        elif kind in (1, 5):
            place += 8 if kind == 1 else 4
        else:
            raise IndexError
    if place > end:
        raise IndexError
    return left


def _varint(raw: bytes, place: int) -> tuple[int, int]:
    """The number at ``place``, and the place behind it."""
    byte = raw[place]
    if byte < 0x80:
        return byte, place + 1
    number, shift = byte & 0x7F, 7
    while byte >= 0x80 and shift < 70:
        place += 1
        byte = raw[place]
        number |= (byte & 0x7F) << shift
        shift += 7
    return number, place + 1
