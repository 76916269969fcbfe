"""Enums of proto3 are open: a number that is none of theirs arrives as it is, and must not pass for a default."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass

from pyruntime.v1 import admin_pb2, embed_pb2, generate_pb2, model_pb2, score_pb2
from tests.service.conftest import Stack, failure_of
from tests.service.test_embed_stream import ended

FILES = (admin_pb2, embed_pb2, generate_pb2, model_pb2, score_pb2)
# Of each method that has such a field, a request that is good apart from it.
GOOD = {
    "Embed": {"model": "encoder", "inputs": [{"text": "a"}]},
    "EmbedStream": {"model": "encoder", "inputs": [{"text": "a"}]},
    "Score": {"query": {"text": "a"}, "items": [{"text": "b"}], "labels": ["x"]},
    "Rerank": {"query": "a", "documents": ["b"]},
    "Classify": {"inputs": [{"text": "a"}]},
}


def enums(message: Any, path: tuple[str, ...] = (), above: tuple[Any, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths of the fields of this project's enums in a message and in those inside it."""
    for field in message.fields:
        if field.enum_type is not None and field.enum_type.full_name.startswith("pyruntime."):
            yield *path, field.name
        elif field.message_type is not None and field.message_type not in (*above, message):
            yield from enums(field.message_type, (*path, field.name), (*above, message))


def cases() -> list[tuple[Any, tuple[str, ...]]]:
    services = [service for file in FILES for service in file.DESCRIPTOR.services_by_name.values()]
    return [(method, path) for service in services for method in service.methods for path in enums(method.input_type)]


@pytest.mark.parametrize(("method", "path"), cases(), ids=lambda each: getattr(each, "name", str(each)))
@pytest.mark.parametrize("number", [77, -1, 2**31 - 1])
async def test_each_enum_field_refuses_what_it_does_not_know(stack: Stack, method, path, number):
    request = GetMessageClass(method.input_type)(**GOOD[method.name])
    inner = request
    for name in path[:-1]:
        inner = getattr(inner, name)
        inner.SetInParent()
    setattr(inner, path[-1], number)
    route = f"/{method.containing_service.full_name}/{method.name}"
    parse = GetMessageClass(method.output_type).FromString
    if method.client_streaming:
        _, failure = await ended(
            stack.channel.stream_stream(route, type(request).SerializeToString, parse)(iter([request]))
        )
    else:
        failure = await failure_of(stack.channel.unary_unary(route, type(request).SerializeToString, parse)(request))
    assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    described = failure.violations[".".join(path)]
    assert str(number) in described and "allowed: " in described


def test_there_are_such_fields():
    assert {method.name for method, _ in cases()} == GOOD.keys()
