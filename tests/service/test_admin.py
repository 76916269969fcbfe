"""AdminService over a real channel, with a loader whose loads end when the test says so."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.protobuf import duration_pb2
from grpc_health.v1 import health_pb2

from pyruntime.config_values import Share
from pyruntime.lifecycle import ModelManager
from pyruntime.registry import ModelRegistry
from pyruntime.service.server_builder import build_server
from pyruntime.types import Capability, Task
from pyruntime.v1 import admin_pb2, admin_pb2_grpc, embed_pb2, generate_pb2, model_pb2
from tests.fakes import fake_model, play
from tests.service.admin_stack import Loader, Operator
from tests.service.conftest import SETTINGS, Stack, failure_of

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


@pytest.fixture
def loader(monkeypatch: pytest.MonkeyPatch) -> Loader:
    loader = Loader()
    monkeypatch.setitem(sys.modules, "pyruntime.serving", SimpleNamespace(load_served_model=loader))
    return loader


@pytest.fixture
async def operator(loader: Loader) -> AsyncIterator[Operator]:
    settings = SETTINGS.model_copy(update={"admin_address": "127.0.0.1:0"})
    registry = ModelRegistry()
    manager = ModelManager(registry, settings, print)
    server = build_server(registry, settings, manager)
    port = await server.start()
    manager.start()
    fake = fake_model("unused", {Capability.EMBED})
    async with (
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
        grpc.aio.insecure_channel(server.admin.address) as admin_channel,
    ):
        yield Operator(Stack(registry, server, channel, fake, fake), admin_channel, manager)
        manager.stop()
        for held in loader.held.values():
            held.set()
        await server.drain(0)
        await manager.close()


async def test_load_serve_unload(operator: Operator, loader: Loader):
    assert await operator.health("") == NOT_SERVING
    answer = await operator.load("a")
    served = await operator.stack.models.GetModel(model_pb2.GetModelRequest(model="a"))
    assert answer.model == served
    assert (await operator.statuses())["a"] == admin_pb2.ModelStatus(
        name="a",
        path="/models/a",
        state=admin_pb2.MODEL_STATE_SERVING,
        load=admin_pb2.ModelLoad(
            queued_tokens=7,
            tokens_per_second=250,
            steps=3,
            step_age=duration_pb2.Duration(nanos=500_000_000),
            tasks=[
                admin_pb2.TaskLoad(
                    task=task.value,
                    waiting_sequences=10 + place,
                    waiting_tokens=20 + place,
                    running_sequences=30 + place,
                    running_tokens=40 + place,
                )
                for place, task in enumerate(Task)
            ],
            paused_sequences=1,
            kv_blocks_used=5,
            kv_blocks_free=6,
            kv_blocks_cached=4,
        ),
    )
    assert [await operator.health(name) for name in ("", "pyruntime.v1.EmbedService", "model/a")] == [SERVING] * 3
    assert (await operator.unload("a")).ended_requests == 0
    assert loader.models["a"].engine.closed
    assert await operator.states() == {}
    assert (await operator.get("a")).code is grpc.StatusCode.NOT_FOUND
    assert [await operator.health(name) for name in ("", "pyruntime.v1.EmbedService")] == [NOT_SERVING] * 2
    gone = health_pb2.HealthCheckRequest(service="model/a")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await operator.stack.health.Check(gone)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert (await operator.stack.health.Watch(gone).read()).status == UNKNOWN
    await operator.load("a")
    assert await operator.health("model/a") == SERVING


async def test_loading_another_model_disturbs_nobody(operator: Operator, loader: Loader):
    await operator.load("a")
    go_on = loader.hold("b")
    loading = operator.load("b")
    await loader.has_begun("b")
    assert await operator.health("") == SERVING
    assert await operator.health("model/b") == NOT_SERVING
    assert (await operator.stack.models.GetModel(model_pb2.GetModelRequest())).name == "a"
    assert (await operator.get("b")).code is grpc.StatusCode.UNAVAILABLE
    assert await operator.states() == {"a": "SERVING", "b": "LOADING"}
    go_on.set()
    assert (await loading).model.name == "b"


async def test_one_name_is_loaded_once(operator: Operator, loader: Loader):
    go_on = loader.hold("a")
    first = operator.load("a", "/models/one")
    await loader.has_begun("a")
    failure = await failure_of(operator.load("a", "/models/two"))
    assert (failure.code, failure.reason) == (grpc.StatusCode.ALREADY_EXISTS, "ALREADY_EXISTS")
    assert "is loading" in failure.message
    go_on.set()
    await first
    assert "is serving" in (await failure_of(operator.load("a", "/models/two"))).message
    assert [path for _, path, _, _ in loader.calls] == ["/models/one"]


async def test_a_failed_load_may_be_tried_again_or_forgotten(operator: Operator):
    failure = await failure_of(operator.load("a", "/nowhere"))
    assert (failure.code, failure.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "MODEL_FAILED")
    assert failure.message == "model 'a' is not served: /nowhere: neither a model folder nor a .gguf file"
    status = (await operator.statuses())["a"]
    assert (status.state, status.path) == (admin_pb2.MODEL_STATE_FAILED, "/nowhere")
    assert status.failure == "/nowhere: neither a model folder nor a .gguf file"
    assert not status.HasField("load")
    assert (await operator.load("a")).model.name == "a"
    await failure_of(operator.load("b", "/nowhere"))
    await operator.unload("b")
    assert await operator.states() == {"a": "SERVING"}


async def test_a_load_goes_on_without_its_caller(operator: Operator, loader: Loader):
    go_on = loader.hold("a")
    loading = operator.load("a")
    await loader.has_begun("a")
    loading.cancel()
    go_on.set()
    await operator.until("a", "SERVING")


async def test_unloading_what_is_being_loaded(operator: Operator, loader: Loader):
    go_on = loader.hold("a")
    loading = asyncio.create_task(failure_of(operator.load("a")))
    await loader.has_begun("a")
    waiting = asyncio.create_task(failure_of(operator.load("b")))
    await operator.until("b", "LOADING")
    await operator.unload("b")  # has not begun: gone at once, while "a" is still held
    assert (await waiting).code is grpc.StatusCode.NOT_FOUND
    unloading = operator.unload("a")
    await operator.until("a", "UNLOADING")
    assert "unloaded" in (await operator.get("a")).message
    assert (await failure_of(operator.load("a"))).code is grpc.StatusCode.ALREADY_EXISTS
    again = asyncio.create_task(operator.manager.unload("a", 0))
    await asyncio.sleep(0)  # it has looked, and waits for the first
    go_on.set()
    await unloading
    await again
    assert (await loading).code in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNAVAILABLE)
    assert loader.models["a"].engine.closed
    assert [name for name, *_ in loader.calls] == ["a"]
    assert await operator.states() == {}


async def test_running_requests_have_their_grace(operator: Operator, loader: Loader):
    await operator.load("a")
    engine: Any = loader.models["a"].engine
    stream = play("abc")
    stream.hold = 1
    engine.next_stream = stream
    call = operator.stack.generate.GenerateStream(generate_pb2.GenerateRequest(model="a", text="x"))
    assert (await call.read()).text == "a"
    unloading = operator.unload("a", 60)
    await operator.until("a", "UNLOADING")
    failure = await operator.get("a")
    assert (failure.code, failure.message) == (grpc.StatusCode.UNAVAILABLE, "model 'a' is being unloaded")
    assert failure.retry_s > 0
    assert await operator.health("model/a") == NOT_SERVING
    assert not engine.closed
    stream.stopped.set()
    assert [(await call.read()).text for _ in range(2)] == ["b", "c"]
    assert (await asyncio.wait_for(unloading, 10)).ended_requests == 0
    assert engine.closed


async def test_a_request_that_outlasts_the_grace_is_counted(operator: Operator, loader: Loader):
    await operator.load("a")
    engine: Any = loader.models["a"].engine
    engine.block = True
    call = operator.stack.embed.Embed(embed_pb2.EmbedRequest(model="a", inputs=[{"text": "x"}]))
    await asyncio.wait_for(engine.blocked.wait(), 5)
    assert (await operator.unload("a", 0)).ended_requests == 1
    assert engine.closed
    call.cancel()


@pytest.mark.parametrize(
    ("name", "path", "options", "field"),
    [
        ("", "/a", {}, "name"),
        (" ", "/a", {}, "name"),
        ("a\n", "/a", {}, "name"),
        ("a" * 257, "/a", {}, "name"),
        ("a", "", {}, "path"),
        ("a", "/a\0", {}, "path"),
        ("a", "/" * 4097, {}, "path"),
        ("a", "/a", {"dtype": "int3"}, "options.dtype"),
        ("a", "/a", {"quantization": "int3"}, "options.quantization"),
        ("a", "/a", {"kv_cache_bytes": "lots"}, "options.kv_cache_bytes"),
        ("a", "/a", {"kv_cache_bytes": "96%"}, "options.kv_cache_bytes"),
        ("a", "/a", {"kv_cache_bytes": "9" * 400}, "options.kv_cache_bytes"),
    ],
)
async def test_bad_loads_are_refused(operator: Operator, name: str, path: str, options: dict, field: str):
    failure = await failure_of(operator.load(name, path, **options))
    assert (failure.code, list(failure.violations)) == (grpc.StatusCode.INVALID_ARGUMENT, [field])
    assert await operator.states() == {}


async def test_bad_unloads_are_refused(operator: Operator):
    await operator.load("a")
    for grace in (duration_pb2.Duration(seconds=-1), duration_pb2.Duration(seconds=3601)):
        request = admin_pb2.UnloadModelRequest(name="a", grace=grace)
        failure = await failure_of(operator.stub.UnloadModel(request))
        assert list(failure.violations) == ["grace"]
    assert list((await failure_of(operator.unload(""))).violations) == ["name"]
    failure = await failure_of(operator.unload("nobody"))
    assert (failure.code, failure.message) == (grpc.StatusCode.NOT_FOUND, "unknown model 'nobody'; known: a")
    assert await operator.states() == {"a": "SERVING"}


async def test_options_differ_for_this_model_alone(operator: Operator, loader: Loader):
    await operator.load("a", dtype="bfloat16", kv_cache_bytes="25%", prefix_cache=False, self_check=False)
    await operator.load("b")
    own, other = loader.calls[0][2], loader.calls[1][2]
    assert (own.dtype, own.kv_cache_bytes, own.prefix_cache, own.self_check) == ("bfloat16", Share(25), False, False)
    assert own.max_text_bytes == SETTINGS.max_text_bytes
    assert (other.dtype, other.kv_cache_bytes, other.prefix_cache, other.self_check) == ("auto", 2**30, True, True)


async def test_a_drain_ends_the_calls_of_the_operator(operator: Operator, loader: Loader):
    loader.hold("a")
    loading = asyncio.create_task(failure_of(operator.load("a")))
    await loader.has_begun("a")
    await operator.stack.server.drain(0)
    failure = await loading
    assert (failure.code, failure.message) == (grpc.StatusCode.UNAVAILABLE, "the server is shutting down")


async def test_nothing_is_begun_while_draining(operator: Operator):
    await operator.load("a")
    operator.stack.registry.drain()
    for call in (operator.load("b"), operator.unload("a")):
        failure = await failure_of(call)
        assert (failure.code, failure.message) == (grpc.StatusCode.UNAVAILABLE, "the server is shutting down")
    assert await operator.states() == {"a": "SERVING"}


async def test_only_those_of_the_start_that_are_still_wanted_share_memory(operator: Operator, loader: Loader):
    go_on = loader.hold("a")
    operator.manager.load("a", "/a")
    await loader.has_begun("a")
    for name in "bcd":
        operator.manager.load(name, "/a")
    late = operator.load("late")
    await operator.until("late", "LOADING")
    await operator.unload("d")
    go_on.set()
    await operator.until("late", "SERVING")
    await late
    assert {name: shared for name, *_, shared in loader.calls} == {"a": 1, "b": 2, "c": 1, "late": None}


async def test_clients_do_not_get_to_it(operator: Operator):
    stub = admin_pb2_grpc.AdminServiceStub(operator.stack.channel)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.ListModelStates(admin_pb2.ListModelStatesRequest())
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
