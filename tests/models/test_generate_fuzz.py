"""Requests made of random fields, over a real model: each is answered or refused by name, and none disturbs another."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from pyruntime.config import Settings
from pyruntime.serving import load_served_model
from pyruntime.v1 import generate_pb2
from tests.fake_compute import until
from tests.models.byte_model import channel_to, save_byte_model

ALLOWED = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION}
EDGES: dict[int, list[Any]] = {
    FieldDescriptor.TYPE_FLOAT: [0, -0.0, 1, 2, -2, 100, 1e-45, 3.4028235e38, float("nan"), float("inf"), 0.5],
    FieldDescriptor.TYPE_INT32: [0, 1, -1, 5, 50, 2**31 - 1, -(2**31)],
    FieldDescriptor.TYPE_UINT32: [0, 1, 2, 3, 5, 20, 64, 97, 128, 255, 257, 259, 260, 2**32 - 1],
    FieldDescriptor.TYPE_UINT64: [0, 1, 2**64 - 1],
    FieldDescriptor.TYPE_BOOL: [False, True],
    FieldDescriptor.TYPE_STRING: [
        *["", "a", "hello there", " ", "é日本", "\x00", "x" * 300, "🙂", "<s>", "</s>", "<mark>", "<extra>"],
        *["{}", "[1]", '{"type": "integer"}', "[a-c]+", 'start: "a"+', "user", "robot", "(", "tools"],
    ],
}
# So that most requests are not refused for the first of many reasons.
TAMED: dict[str, list[Any]] = {
    "n": [1, 2, 5, 128],
    "chunk_tokens": [1, 3, 1000],
    "max_new_tokens": [1, 9, 20],
    "min_new_tokens": [0, 1],
}
TAME_NUMBERS = [0.9, 0.5, 1.0, 1e-45]


class Author:
    """Writes requests; each of a message's fields is set with odds of its own."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)

    def request(self) -> generate_pb2.GenerateRequest:
        message = generate_pb2.GenerateRequest()
        self._fill(message, self._draw.choice([0.1, 0.2, 0.4]))
        message.model = ""
        if self._draw.random() < 0.9:
            self._tame(message)
        return message

    def _fill(self, message: Message, odds: float) -> None:
        groups = [group.fields for group in message.DESCRIPTOR.oneofs if len(group.fields) > 1]
        grouped = {field.name for group in groups for field in group}
        chosen = [field for field in message.DESCRIPTOR.fields if self._draw.random() < odds]
        chosen = [field for field in chosen if field.name not in grouped]
        for field in chosen + [self._draw.choice(group) for group in groups]:
            self._set(message, field, odds)

    def _set(self, message: Message, field: FieldDescriptor, odds: float) -> None:
        value, kind = getattr(message, field.name), field.message_type
        count = self._draw.choice([0, 1, 2, 5, 33])
        if kind is not None and kind.GetOptions().map_entry:
            for _ in range(count):
                value[self._draw.randrange(262)] = self._draw.choice(EDGES[FieldDescriptor.TYPE_FLOAT])
        elif kind is not None and kind.file.name.startswith("google/"):
            value.update({"mood": "glad", "x": [None, 1.5]})
        elif kind is not None and field.is_repeated:
            for _ in range(count % 6):
                self._fill(value.add(), 0.6)
        elif kind is not None:
            value.SetInParent()
            self._fill(value, odds)
        elif field.is_repeated:
            of_ids = field.type == FieldDescriptor.TYPE_UINT32
            choices = range(261) if of_ids else EDGES[field.type]
            value.extend(self._draw.choice(choices) for _ in range(count))
        else:
            setattr(message, field.name, self._draw.choice(EDGES[field.type]))

    def _tame(self, message: generate_pb2.GenerateRequest) -> None:
        for field, _ in message.sampling.ListFields():
            if field.type == FieldDescriptor.TYPE_FLOAT and not field.is_repeated:
                setattr(message.sampling, field.name, self._draw.choice(TAME_NUMBERS))
        for owner in (message, message.stop):
            for name in TAMED.keys() & owner.DESCRIPTOR.fields_by_name.keys():
                if owner.HasField(name) or name == "max_new_tokens":
                    setattr(owner, name, self._draw.choice(TAMED[name]))
        message.logprobs.enabled = True
        message.logprobs.top %= 21


async def answer(stub, request: generate_pb2.GenerateRequest, streams: bool) -> grpc.StatusCode:
    try:
        if streams:
            async for _ in stub.GenerateStream(request):
                pass
        else:
            await stub.Generate(request)
    except grpc.aio.AioRpcError as error:
        assert error.code() in ALLOWED, f"{error.code()}: {error.details()}\n{request}"
        assert error.details()
        return error.code()
    return grpc.StatusCode.OK


@pytest.mark.parametrize("seed", [1, *[pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 12)]])
async def test_random_requests(tmp_path, seed):
    settings = Settings(dtype="float32", self_check=False)
    model = load_served_model("fuzzed", save_byte_model(tmp_path), settings, lambda _: None)
    author, codes = Author(seed), Counter()
    steady = generate_pb2.GenerateRequest(
        text="steady", sampling={"temperature": 0}, stop={"max_new_tokens": 30, "ignore_eos": True}
    )
    async with channel_to(model) as stub:
        alone = (await stub.Generate(steady)).completions
        for _ in range(12):
            requests = [author.request() for _ in range(12)]
            answers = [answer(stub, each, place % 2 == 0) for place, each in enumerate(requests)]
            beside, *found = await asyncio.gather(stub.Generate(steady), *answers)
            assert beside.completions == alone
            codes.update(found)
    await until(lambda: model.engine.num_open == 0)
    model.engine.close()
    assert codes[grpc.StatusCode.OK] > 20 and codes[grpc.StatusCode.INVALID_ARGUMENT] > 20, codes
