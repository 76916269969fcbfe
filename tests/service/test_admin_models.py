"""AdminService with real models, small and random: what is loaded answers, and what is unloaded is gone from memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import AsyncIterator, Collection
from pathlib import Path

import grpc
import pytest
import torch
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

from pyruntime.config import Settings
from pyruntime.config_values import Share
from pyruntime.errors import ModelLoadError
from pyruntime.lifecycle import ModelManager
from pyruntime.model import kv_cache
from pyruntime.model.kv_cache import KVCache, bytes_for_cache
from pyruntime.registry import ModelRegistry
from pyruntime.service.server_builder import build_server
from pyruntime.types import Capability
from pyruntime.v1 import embed_pb2, generate_pb2, model_pb2
from tests.fakes import byte_tokenizer, fake_model
from tests.service.admin_stack import Operator
from tests.service.conftest import Stack, failure_of

# Each of its four tensors is larger than what the C library would keep for reuse (32 MiB).
CACHE_BYTES = 160 * 2**20
SIZES = {"vocab_size": 260, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 128, "max_position_embeddings": 4096}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    torch.manual_seed(0)
    models = {
        "llama": LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
        "bert": BertModel(BertConfig(**SIZES)),
    }
    root = tmp_path_factory.mktemp("models")
    for name, model in models.items():
        model.eval().save_pretrained(root / name)
        byte_tokenizer()._hf.save_pretrained(root / name)
    return {name: root / name for name in models}


@pytest.fixture
async def operator() -> AsyncIterator[Operator]:
    settings = Settings(port=0, admin_address="127.0.0.1:0", kv_cache_bytes=CACHE_BYTES)
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
        await server.drain(0)
        await manager.close()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def generate(num_tokens: int) -> generate_pb2.GenerateRequest:
    stop = generate_pb2.Stop(max_new_tokens=num_tokens, ignore_eos=True)
    return generate_pb2.GenerateRequest(model="chat", text="hello", stop=stop)


@pytest.fixture
def others() -> set[KVCache]:
    """Caches of models that other tests keep."""
    gc.collect()
    return set(KVCache._alive)


async def test_what_is_loaded_answers_and_tells_its_memory(operator: Operator, folders: dict[str, Path]):
    chat = (await operator.load("chat", str(folders["llama"]))).model
    texts = (await operator.load("texts", str(folders["bert"]))).model
    tied = LlamaForCausalLM.from_pretrained(folders["llama"])
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    numbers = sum(each.numel() for each in (*tied.parameters(), *tied.buffers()))
    assert 0 <= chat.weights_bytes - 4 * numbers < 2**12  # and what the loader keeps beside them
    # Keys and values of two layers, 64 numbers each, float32.
    assert chat.kv_cache_bytes == chat.kv_cache_tokens * 2 * 2 * 64 * 4
    assert CACHE_BYTES * 0.99 < chat.kv_cache_bytes <= CACHE_BYTES
    assert (texts.kv_cache_bytes, texts.kv_cache_tokens) == (0, 0)
    assert texts.weights_bytes > 4 * 260 * 64
    answer = await operator.stack.generate.Generate(generate(5))
    assert answer.usage.completion_tokens == 5
    vectors = await operator.stack.embed.Embed(embed_pb2.EmbedRequest(model="texts", inputs=[{"text": "a"}]))
    assert len(vectors.results[0].dense.values) == 64
    load = (await operator.statuses())["chat"].load
    assert load.kv_blocks_used + load.kv_blocks_free == chat.kv_cache_tokens // 16
    assert load.steps >= 5


def llamas(but: Collection[int] = ()) -> list[LlamaForCausalLM]:
    """Those of the process; ``but`` the ids of those that other tests have left."""
    gc.unfreeze()  # or they would not be among the objects
    objects = gc.get_objects()
    gc.freeze()  # as a load leaves them
    return [each for each in objects if type(each) is LlamaForCausalLM and id(each) not in but]


async def test_unloading_gives_the_memory_back(operator: Operator, folders: dict[str, Path], others: set[KVCache]):
    gc.collect()
    left = {id(each) for each in llamas()}
    await operator.load("chat", str(folders["llama"]))
    served = operator.stack.registry.resolve("chat", None)
    engine = weakref.ref(served.engine)
    del served
    caches = [weakref.ref(cache) for cache in KVCache._alive if cache not in others]
    models = [weakref.ref(each) for each in llamas(left)]
    assert len(caches) == len(models) == 1
    await operator.stack.generate.Generate(generate(3))
    before = resident_bytes()
    await operator.unload("chat")
    assert before - resident_bytes() > 0.8 * CACHE_BYTES
    assert [ref() for ref in (*caches, *models)] == [None, None]
    request = model_pb2.GetModelRequest(model="chat")
    assert (await failure_of(operator.stack.models.GetModel(request))).code is grpc.StatusCode.NOT_FOUND
    gc.collect()
    assert engine() is None  # the small rest, which gRPC keeps with the last call until another comes


async def test_the_collector_passes_over_what_is_loaded(operator: Operator, folders: dict[str, Path]):
    await operator.load("chat", str(folders["llama"]))
    assert len(gc.get_objects()) < gc.get_freeze_count() / 10
    await operator.unload("chat")
    assert gc.get_freeze_count() == 0


async def test_a_stream_that_outlasts_the_grace_is_told_to_go_elsewhere(
    operator: Operator, folders: dict[str, Path], others: set[KVCache]
):
    await operator.load("chat", str(folders["llama"]))
    call = operator.stack.generate.GenerateStream(generate(4000))
    await call.read()
    answer = await operator.unload("chat", 0)
    assert answer.ended_requests == 1
    failure = await failure_of(call)
    assert failure.code is grpc.StatusCode.UNAVAILABLE
    assert failure.retry_s > 0
    assert set(KVCache._alive) == others


async def test_a_model_that_does_not_fit_is_refused_and_leaves_nothing(
    operator: Operator, folders: dict[str, Path], others: set[KVCache]
):
    gc.collect()
    left = {id(each) for each in llamas()}
    failure = await failure_of(operator.load("chat", str(folders["llama"]), kv_cache_bytes="16TiB"))
    assert failure.code is grpc.StatusCode.FAILED_PRECONDITION
    assert "kv_cache_bytes: 17592186044416 bytes are not there" in failure.message
    failure = await failure_of(operator.load("chat", str(folders["llama"]) + "x"))
    assert "neither a model folder nor a .gguf file" in failure.message
    assert not llamas(left)
    assert set(KVCache._alive) == others


def test_a_share_is_of_what_the_weights_leave_and_divided_evenly(monkeypatch: pytest.MonkeyPatch):
    free = 1000
    monkeypatch.setattr(kv_cache, "free_bytes", lambda device: free)
    monkeypatch.setattr(KVCache, "bytes_on", classmethod(lambda cls, device: 1000 - free))
    given = []
    for num_sharing in (3, 2, 1):
        given.append(bytes_for_cache(Share(60), "cpu", num_sharing))
        free -= given[-1]
    assert given == [200, 200, 200]
    assert bytes_for_cache(Share(60), "cpu", 1) == 0  # all of the share is taken
    assert bytes_for_cache(Share(80), "cpu", 1) == 200
    assert bytes_for_cache(Share(60), "cpu", None) == 240  # of the 400 that are free now
    assert bytes_for_cache(400, "cpu", 9) == 400
    with pytest.raises(ModelLoadError, match="free after the weights: 400"):
        bytes_for_cache(401, "cpu", 9)


def test_caches_are_counted_while_they_live():
    shape = kv_cache.LayerShape(num_kv_heads=2, key_width=8, value_width=4)
    before = KVCache.bytes_on("cpu")
    cache = KVCache({0: shape, 3: shape}, 5, 16, torch.bfloat16, "cpu")
    assert cache.num_bytes == 2 * 5 * 16 * 2 * (8 + 4) * 2
    assert KVCache.bytes_on("cpu") - before == cache.num_bytes
    assert KVCache.bytes_on("cuda:0") == 0
    del cache
    assert KVCache.bytes_on("cpu") == before
