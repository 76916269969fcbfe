"""Requests as they come over the wire: gzip within bounds, and fields that are counted before they are parsed."""

from __future__ import annotations

import contextlib
import gzip
import random
import zlib
from collections.abc import Callable

import psutil
import pytest
from google.protobuf.message import DecodeError

from pyruntime.errors import MalformedMessage, RequestTooLarge
from pyruntime.service import field_budget
from pyruntime.service.incoming import BadMessage, gunzip, reader
from pyruntime.v1 import embed_pb2, generate_pb2


def bomb(mebibytes: int) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    return b"".join(packer.compress(bytes(2**20)) for _ in range(mebibytes)) + packer.flush()


def test_a_bomb_costs_no_more_than_the_limit():
    packed = bomb(256)
    before = psutil.Process().memory_info().rss
    with pytest.raises(RequestTooLarge):
        gunzip(packed, 8 * 2**20)
    assert psutil.Process().memory_info().rss - before < 40 * 2**20


def test_a_few_packed_bytes_do_not_become_a_large_message():
    text = random.Random(1).randbytes(2000) * 100  # 200 kB, some hundred times as large as packed
    assert gunzip(gzip.compress(text), 2**26) == text
    with pytest.raises(RequestTooLarge, match="more than 4194304 bytes once decompressed"):
        gunzip(bomb(5), 2**26)


@pytest.mark.parametrize("spoil", [lambda raw: raw[:-1], lambda raw: raw + b"x", lambda raw: raw[:9], lambda raw: b"x"])
def test_gzip_that_is_not_whole(spoil: Callable[[bytes], bytes]):
    packed = gzip.compress(b"hello")
    assert gunzip(packed, 5) == b"hello"
    with pytest.raises(RequestTooLarge):
        gunzip(packed, 4)
    with pytest.raises(MalformedMessage):
        gunzip(spoil(packed), 100)


# -- fields -------------------------------------------------------------------------------------------


def good_request() -> embed_pb2.EmbedRequest:
    """Larger than what is not looked at, with lists in lists, numbers and texts."""
    inputs = [{"token_ids": {"ids": range(300)}} if place % 2 else {"text": "é" * 300} for place in range(500)]
    return embed_pb2.EmbedRequest(model="m", inputs=inputs, priority=-1, dimensions=2**31, request_id="r" * 200)


def test_a_large_request_passes_as_it_is():
    request = good_request()
    read = reader(embed_pb2.EmbedRequest.FromString, 2**26)
    assert read(request.SerializeToString()) == request
    chat = generate_pb2.GenerateRequest(chat={"messages": [{"role": "user", "content": "x" * 100}] * 1000})
    chat.sampling.logit_bias.update(dict.fromkeys(range(1000), 0.5))
    chat.chat.template_arguments.update({"a": [{"b": [1, 2.5, None, True, "c"]}] * 100})
    assert reader(generate_pb2.GenerateRequest.FromString, 2**26)(chat.SerializeToString()) == chat


def test_fields_are_counted_before_they_are_parsed():
    request = embed_pb2.EmbedRequest()
    request.inputs.add()
    entry = request.SerializeToString()
    read = reader(embed_pb2.EmbedRequest.FromString, 2**26)
    assert len(read(entry * field_budget.MAX_FIELDS).inputs) == field_budget.MAX_FIELDS
    bad = read(entry * (field_budget.MAX_FIELDS + 1))
    assert isinstance(bad.error, RequestTooLarge)
    before = psutil.Process().memory_info().rss
    assert isinstance(read(entry * 2**24).error, RequestTooLarge)
    assert psutil.Process().memory_info().rss - before < 50 * 2**20  # parsed it would be 800 MB
    # Also those inside another message, of which this has one alone.
    chat = generate_pb2.Chat(messages=[{}]).SerializeToString() * (field_budget.MAX_FIELDS + 1)
    whole = generate_pb2.GenerateRequest(model="m").SerializeToString() + b"\x22" + varint(len(chat)) + chat
    assert isinstance(reader(generate_pb2.GenerateRequest.FromString, 2**26)(whole).error, RequestTooLarge)


def varint(number: int) -> bytes:
    low, rest = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + varint(rest) if rest else bytes([low])


def test_the_walk_and_the_parser_agree_on_what_is_whole(monkeypatch):
    """Cut or changed at any place, a message is good to both or to neither, apart from what only the parser sees."""
    monkeypatch.setattr(field_budget, "SMALL_BYTES", 0)
    request = embed_pb2.EmbedRequest(model="m", inputs=[{"text": "abc"}, {"token_ids": {"ids": [1, 300]}}], priority=-1)
    raw, read = request.SerializeToString(), reader(embed_pb2.EmbedRequest.FromString, 2**20)
    children = field_budget.children_of(embed_pb2.EmbedRequest.DESCRIPTOR)
    random_bytes = random.Random(3)
    cut = [raw[:length] for length in range(len(raw))]
    changed = [
        raw[:place] + bytes([random_bytes.randrange(256)]) + raw[place + 1 :]
        for place in range(len(raw))
        for _ in range(40)
    ]
    for data in cut + changed:
        try:
            embed_pb2.EmbedRequest.FromString(data)
        except DecodeError:
            assert isinstance(read(data), BadMessage)
            continue
        with contextlib.suppress(MalformedMessage):  # groups, which no message of this project has
            field_budget.check_fields(data, children)
            assert not isinstance(read(data), BadMessage)
