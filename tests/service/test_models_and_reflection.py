"""ModelService; reflection and the printed examples, through ``buf curl``."""

from __future__ import annotations

import asyncio
import json
import shlex
import shutil
import sys
from pathlib import Path

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_reflection.v1alpha import reflection_pb2

from pyruntime.service.examples import example_requests, grpcurl_calls
from pyruntime.v1 import embed_pb2, generate_pb2, model_pb2
from tests.fakes import BOS, EOS, VOCAB
from tests.service.conftest import Stack, failure_of

BUF = shutil.which("buf", path=str(Path(sys.executable).parent)) or shutil.which("buf")


async def test_list_and_get(stack: Stack):
    listed = (await stack.models.ListModels(model_pb2.ListModelsRequest())).models
    assert [model.name for model in listed] == ["decoder", "encoder"]
    decoder = await stack.models.GetModel(model_pb2.GetModelRequest(model="decoder"))
    assert decoder == listed[0]
    assert list(decoder.capabilities) == [
        model_pb2.CAPABILITY_GENERATE,
        model_pb2.CAPABILITY_EMBED,
        model_pb2.CAPABILITY_SCORE,
    ]
    assert (decoder.context_length, decoder.vocab_size, decoder.embedding_dimensions) == (64, VOCAB, 12)
    assert (decoder.pooling, decoder.normalize) == (embed_pb2.POOLING_MEAN, True)
    assert (decoder.dtype, decoder.quantization, decoder.device) == ("float32", "none", "cpu")
    assert (dict(decoder.prompts), decoder.HasField("default_prompt_name")) == ({"query": "q: "}, False)
    assert listed[1].default_prompt_name == "query"
    limits = decoder.limits
    assert (limits.max_message_bytes, limits.max_inputs_per_request, limits.max_text_bytes) == (100_000, 8, 1000)
    assert (limits.max_labels_per_request, limits.max_scores_per_request, limits.max_request_text_bytes) == (
        10,
        20,
        3000,
    )
    assert listed[1].limits == limits
    assert "decoder, encoder" in (await failure_of(stack.models.GetModel(model_pb2.GetModelRequest()))).message


async def test_tokenize_and_detokenize(stack: Stack):
    async def ids_of(**fields) -> list[int]:
        return list((await stack.models.Tokenize(model_pb2.TokenizeRequest(model="decoder", **fields))).token_ids)

    answer = await stack.models.Tokenize(model_pb2.TokenizeRequest(model="decoder", text="a b"))
    assert list(answer.token_ids) == [BOS, *b"a b"]
    assert list(answer.pieces) == ["<s>", "a", "Ġ", "b"]
    assert await ids_of(text="a", special_tokens=False) == [ord("a")]
    assert await ids_of(text="") == [BOS]
    long = "é" * 400  # past what is tokenised on the event loop
    assert await ids_of(text=long) == [BOS, *long.encode()]
    chat = generate_pb2.Chat(messages=[{"role": "u", "content": "x"}])
    assert await ids_of(chat=chat) == [BOS, *b"u: x\nbot:"]
    failure = await failure_of(stack.models.Tokenize(model_pb2.TokenizeRequest(model="decoder")))
    assert list(failure.violations) == ["input"]

    request = model_pb2.DetokenizeRequest(model="decoder", token_ids=[BOS, *"né".encode(), EOS])
    assert (await stack.models.Detokenize(request)).text == "né"
    request.skip_special_tokens = False
    assert (await stack.models.Detokenize(request)).text == "<s>né</s>"
    request.token_ids.append(VOCAB)
    assert list((await failure_of(stack.models.Detokenize(request))).violations) == ["token_ids[5]"]
    request = model_pb2.DetokenizeRequest(model="decoder", token_ids=[1] * 1001)
    failure = await failure_of(stack.models.Detokenize(request))
    assert failure.violations == {"token_ids": "has 1001 entries; allowed: at most 1000"}


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_speaks_both_versions(stack: Stack, version: str):
    method = stack.channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    ask = reflection_pb2.ServerReflectionRequest
    own = f"grpc.reflection.{version}.ServerReflection"
    call = method(iter([ask(list_services=""), ask(file_containing_symbol=own)]))
    services = {service.name for service in (await call.read()).list_services_response.service}
    expected = {f"pyruntime.v1.{name}Service" for name in ("Generate", "Embed", "Score", "Model")}
    assert expected | {own, "grpc.health.v1.Health"} <= services
    (file, *_) = (await call.read()).file_descriptor_response.file_descriptor_proto
    described = descriptor_pb2.FileDescriptorProto.FromString(file)
    assert described.package == f"grpc.reflection.{version}"
    assert described.service[0].method[0].input_type == f".grpc.reflection.{version}.ServerReflectionRequest"


async def curl(stack: Stack, method: str, body: str, protocol: str = "grpc-v1") -> list[dict]:
    """What ``buf curl`` prints; it learns the types by reflection alone."""
    assert BUF is not None, "buf is missing: pip install buf-bin"
    url = f"http://{stack.address}/{method}"
    options = ["--protocol", "grpc", "--http2-prior-knowledge", "--reflect-protocol", protocol, "-d", body]
    process = await asyncio.create_subprocess_exec(
        BUF, "curl", *options, url, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 0, err.decode()
    decoder, text, values = json.JSONDecoder(), out.decode().strip(), []
    while text:
        value, end = decoder.raw_decode(text)
        values.append(value)
        text = text[end:].lstrip()
    return values


@pytest.mark.parametrize("protocol", ["grpc-v1", "grpc-v1alpha"])
async def test_buf_curl_finds_the_types_by_reflection(stack: Stack, protocol: str):
    (answer,) = await curl(stack, "pyruntime.v1.ModelService/ListModels", "{}", protocol)
    assert [model["name"] for model in answer["models"]] == ["decoder", "encoder"]


async def test_printed_examples_work_when_pasted(stack: Stack):
    models = stack.registry.serving()
    # Labels must be one token: with a byte a token those of the examples are more, so two that are take their place.
    printed = grpcurl_calls(models, stack.address)
    assert [method for method, _ in example_requests(models)] == [
        "pyruntime.v1.ModelService/ListModels",
        "pyruntime.v1.GenerateService/GenerateStream",
        "pyruntime.v1.EmbedService/Embed",
        "pyruntime.v1.ScoreService/Score",
    ]
    answers = []
    for line in printed:
        program, plain, data, body, address, method = shlex.split(line)
        assert (program, plain, data, address) == ("grpcurl", "-plaintext", "-d", stack.address)
        body = (
            body.replace('" red"', '"r"')
            .replace('" blue"', '"b"')
            .replace('"max_new_tokens": 24', '"max_new_tokens": 9')
        )
        answers.append(await curl(stack, method, body))
    models_answer, chunks, embedding, scores = answers
    assert len(models_answer[0]["models"]) == 2
    assert "".join(chunk.get("text", "") for chunk in chunks) == "ok"
    assert len(embedding[0]["results"][1]["dense"]["values"]) == 8
    assert len(scores[0]["results"][1]["scores"]) == 2


async def test_unknown_method(stack: Stack):
    method = stack.channel.unary_unary("/pyruntime.v1.ModelService/Nothing")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await method(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
