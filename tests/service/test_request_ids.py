"""Each call has a name, which the client gives or gets, in whatever way the call ends."""

from __future__ import annotations

import re

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from pyruntime.config import Settings
from pyruntime.lifecycle import ModelManager
from pyruntime.registry import ModelRegistry
from pyruntime.service.request_id import REQUEST_ID_KEY, is_clean
from pyruntime.service.server_builder import build_server
from pyruntime.v1 import admin_pb2, admin_pb2_grpc, embed_pb2, generate_pb2, model_pb2
from tests.service.call_site import Log
from tests.service.conftest import Stack

MADE = re.compile("[0-9a-f]{32}")
GOOD = embed_pb2.EmbedRequest(model="encoder", inputs=[{"text": "a"}])


async def id_of(call) -> str:
    """Reads the call to its end, good or bad."""
    try:
        if isinstance(call, (grpc.aio.UnaryStreamCall, grpc.aio.StreamStreamCall)):
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError:
        pass
    (found,) = [value for key, value in await call.trailing_metadata() if key == REQUEST_ID_KEY]
    return found


def named(name: str | bytes) -> tuple[tuple[str, str | bytes], ...]:
    return ((REQUEST_ID_KEY, name),)


async def test_an_id_comes_back_from_every_kind_of_call(stack: Stack):
    generate = generate_pb2.GenerateRequest(model="decoder", text="hi")
    bad = generate_pb2.GenerateRequest(model="decoder", text="")
    reflection = reflection_pb2_grpc.ServerReflectionStub(stack.channel)
    calls = [
        lambda **more: stack.embed.Embed(GOOD, **more),
        lambda **more: stack.embed.EmbedStream(iter([GOOD, GOOD]), **more),
        lambda **more: stack.generate.Generate(generate, **more),
        lambda **more: stack.generate.GenerateStream(generate, **more),
        lambda **more: stack.generate.Generate(bad, **more),
        lambda **more: stack.generate.GenerateStream(bad, **more),
        lambda **more: stack.models.ListModels(model_pb2.ListModelsRequest(), **more),
        lambda **more: stack.models.GetModel(model_pb2.GetModelRequest(model="none"), **more),
        lambda **more: stack.health.Check(health_pb2.HealthCheckRequest(), **more),
        lambda **more: stack.health.Check(health_pb2.HealthCheckRequest(service="none"), **more),
        lambda **more: reflection.ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")]), **more
        ),
        lambda **more: stack.channel.unary_unary("/pyruntime.v1.EmbedService/None")(b"", **more),
        lambda **more: stack.channel.unary_unary("/pyruntime.v1.EmbedService/Embed")(b"\xff", **more),
        lambda **more: stack.channel.stream_stream("/none/None")(iter([b""]), **more),
    ]
    for place, call in enumerate(calls):
        assert await id_of(call(metadata=named(f"call-{place}"))) == f"call-{place}"
    made = [await id_of(call()) for call in calls]
    assert all(MADE.fullmatch(each) for each in made)
    assert len(set(made)) == len(calls)


@pytest.mark.parametrize("name", ["", "two words", "x" * 257, " ", "{'a': 1} ,"])
async def test_an_id_that_is_not_clean_is_replaced(stack: Stack, name: str):
    with Log().kept() as log:
        assert MADE.fullmatch(await id_of(stack.embed.Embed(GOOD, metadata=named(name))))
    assert MADE.fullmatch(log.calls[0]["request_id"])


@pytest.mark.parametrize("name", ["a\nb", "a\x00", "\x7f", "é", "\u2028", b"ab", None, 7])
def test_what_this_client_would_not_send_is_not_clean_either(name: object):
    assert not is_clean(name)


async def test_the_longest_id_is_taken_and_the_first_of_several_is_one_of_them(stack: Stack):
    longest = "~" * 128 + "!" * 128
    assert await id_of(stack.embed.Embed(GOOD, metadata=named(longest))) == longest
    assert await id_of(stack.embed.Embed(GOOD, metadata=(*named("one"), *named("two")))) in ("one", "two")


async def test_the_field_names_a_call_that_its_metadata_does_not(stack: Stack):
    with Log().kept() as log:
        own = embed_pb2.EmbedRequest(model="encoder", inputs=[{"text": "a"}], request_id="own")
        assert await id_of(stack.embed.Embed(own)) == "own"
        assert await id_of(stack.embed.Embed(own, metadata=named("the-mesh"))) == "the-mesh"
        assert await id_of(stack.embed.Embed(own, metadata=named("own"))) == "own"
        wild = embed_pb2.EmbedRequest(model="encoder", inputs=[{"text": "a"}], request_id="a\nb é")
        assert MADE.fullmatch(await id_of(stack.embed.Embed(wild)))
        assert MADE.fullmatch(await id_of(stack.embed.EmbedStream(iter([own]))))
    names = [(line["request_id"], line.get("client_request_id")) for line in log.calls]
    assert names[:3] == [("own", None), ("the-mesh", "own"), ("own", None)]
    assert [other for _, other in names[3:]] == [None, None]


async def test_an_error_names_its_call_in_its_details(stack: Stack):
    bad = generate_pb2.GenerateRequest(model="decoder", text="")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.generate.Generate(bad, metadata=named("mine"))
    trailers = caught.value.trailing_metadata()
    status = status_pb2.Status.FromString(dict(trailers)["grpc-status-details-bin"])
    info = error_details_pb2.RequestInfo()
    assert [detail.Unpack(info) for detail in status.details].count(True) == 1
    assert info.request_id == "mine"
    assert status.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]


async def test_the_operators_calls_have_ids_too():
    settings = Settings(port=0, admin_address="127.0.0.1:0")
    registry = ModelRegistry()
    server = build_server(registry, settings, ModelManager(registry, settings, print))
    await server.start()
    assert server.admin is not None
    async with grpc.aio.insecure_channel(server.admin.address) as channel:
        admin = admin_pb2_grpc.AdminServiceStub(channel)
        call = admin.ListModelStates(admin_pb2.ListModelStatesRequest(), metadata=named("mine"))
        assert await id_of(call) == "mine"
        assert MADE.fullmatch(await id_of(admin.UnloadModel(admin_pb2.UnloadModelRequest())))
    await server.drain(0)
