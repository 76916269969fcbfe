"""Embed: encodings, truncation, prompts, errors of single inputs."""

from __future__ import annotations

import grpc
import numpy as np
import pytest

from pyruntime.service.embed_vectors import encode, quantize_int8
from pyruntime.types import EmbeddingKind, PoolingType
from pyruntime.v1 import common_pb2, embed_pb2
from tests.fakes import BOS, POISON, vector_of
from tests.service.conftest import Stack, failure_of, unpack

Ids = common_pb2.TokenIds
Input = common_pb2.Input


def request(*inputs: Input, **fields) -> embed_pb2.EmbedRequest:
    return embed_pb2.EmbedRequest(**{"model": "decoder", "inputs": inputs or [Input(text="a")]} | fields)


async def inputs_of(stack: Stack, req: embed_pb2.EmbedRequest) -> list[list[int]]:
    await stack.embed.Embed(req)
    return stack.engine.embedded[-1].inputs


async def test_results_in_order_with_usage(stack: Stack):
    answer = await stack.embed.Embed(request(Input(text="abc"), Input(token_ids=Ids(ids=[5, 6]))))
    assert answer.model == "decoder"
    assert [(result.index, result.prompt_tokens) for result in answer.results] == [(0, 4), (1, 2)]
    assert answer.usage.prompt_tokens == 6
    np.testing.assert_array_equal(np.float32(answer.results[0].dense.values), vector_of([BOS, *b"abc"], 12))
    np.testing.assert_array_equal(np.float32(answer.results[1].dense.values), vector_of([5, 6], 12))
    job = stack.engine.embedded[0]
    assert (job.pooling, job.normalize, job.dimensions) == (PoolingType.MEAN, True, 12)


async def test_only_a_call_that_is_alone_may_be_computed_at_once(stack: Stack):
    await stack.embed.Embed(request())
    stream = stack.embed.EmbedStream()
    await stream.write(request())
    assert (await stream.read()).results  # though it is alone: its requests are computed together
    await stack.embed.Embed(request())
    await stream.done_writing()
    assert await stream.read() is grpc.aio.EOF
    assert stack.engine.at_once == [True, False, False]


async def test_options_reach_the_engine(stack: Stack):
    req = request(pooling=embed_pb2.POOLING_CLS, normalize=False, dimensions=5, priority=3, request_id="r")
    answer = await stack.embed.Embed(req)
    job = stack.engine.embedded[0]
    assert (job.pooling, job.normalize, job.dimensions) == (PoolingType.CLS, False, 5)
    assert (job.priority, job.request_id) == (3, "r")
    assert (answer.results[0].dense.dimensions, len(answer.results[0].dense.values)) == (5, 5)


async def test_encodings(stack: Stack):
    expected = vector_of([BOS, *b"a"], 12)

    async def dense(encoding: str) -> embed_pb2.DenseEmbedding:
        answer = await stack.embed.Embed(request(encoding=embed_pb2.Encoding.Value(f"ENCODING_{encoding}")))
        assert answer.results[0].dense.dimensions == 12
        return answer.results[0].dense

    for encoding in ("UNSPECIFIED", "FLOAT"):
        got = await dense(encoding)
        np.testing.assert_array_equal(np.float32(got.values), expected)
        assert got.packed == b""
    assert (await dense("FLOAT32_LE")).packed == expected.tobytes()
    assert (await dense("FLOAT16_LE")).packed == expected.astype(np.float16).tobytes()
    int8 = await dense("INT8")
    bytes_ = np.frombuffer(int8.packed, np.int8)
    assert np.abs(bytes_).max() == 127
    np.testing.assert_allclose(bytes_ * int8.scale, expected, atol=int8.scale / 2 * 1.001)
    binary = np.unpackbits(np.frombuffer((await dense("BINARY")).packed, np.uint8))
    np.testing.assert_array_equal(binary, [*(expected > 0), 0, 0, 0, 0])
    assert len(int8.values) == 0


def dense(vector: np.ndarray, encoding: embed_pb2.Encoding) -> embed_pb2.DenseEmbedding:
    (payload,) = encode(EmbeddingKind.DENSE, [vector], encoding)
    assert isinstance(payload, bytes)
    return embed_pb2.DenseEmbedding.FromString(payload)


def test_binary_is_most_significant_bit_first():
    vector = np.array([1, -1, -1, -1, -1, -1, -1, -1, 2], np.float32)
    assert dense(vector, embed_pb2.ENCODING_BINARY).packed == b"\x80\x80"


@pytest.mark.parametrize(
    "vector", [np.zeros(3, np.float32), np.float32([1e-45, -1e-44, 0]), np.float32([3e38, -3e38, 1])]
)
def test_int8_of_extreme_vectors(vector):
    (packed,), ((scale,),) = quantize_int8(vector[None])
    got = packed.astype(np.float64) * scale
    assert np.isfinite(got).all()
    assert np.abs(got - vector).max() <= max(np.abs(vector).max() / 127, 1.5e-45 * 127)


@pytest.mark.parametrize("size", [1, 31, 32, 4096])
def test_float_values_are_what_protobuf_itself_writes(size: int):
    vector = np.random.default_rng(size).standard_normal(size).astype(np.float32)
    expected = embed_pb2.DenseEmbedding(values=vector.tolist(), dimensions=size)
    assert encode(EmbeddingKind.DENSE, [vector], embed_pb2.ENCODING_FLOAT) == [expected.SerializeToString()]


async def test_float16_overflow_is_that_inputs_error(stack: Stack, monkeypatch):
    def huge(ids, dimensions):
        return np.full(dimensions, 1e6 if 98 in ids else 1.0, np.float32)

    monkeypatch.setattr("tests.fakes.vector_of", huge)
    req = request(Input(text="a"), Input(text="b"), encoding=embed_pb2.ENCODING_FLOAT16_LE)
    answer = await stack.embed.Embed(req)
    assert answer.results[0].HasField("dense")
    failure = unpack(answer.results[1].error)
    assert (failure.code, list(failure.violations)) == (grpc.StatusCode.INVALID_ARGUMENT, ["encoding"])


async def test_a_request_whose_every_vector_overflows_float16_is_refused_whole(stack: Stack, monkeypatch):
    monkeypatch.setattr("tests.fakes.vector_of", lambda ids, dimensions: np.full(dimensions, 1e6, np.float32))
    blank = Input(text=" ")
    for inputs in ([Input(text="a")], [Input(text="a"), blank, Input(text="b")]):
        failure = await failure_of(stack.embed.Embed(request(*inputs, encoding=embed_pb2.ENCODING_FLOAT16_LE)))
        assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
        assert set(failure.violations) == {"encoding"} | ({"inputs[1].text"} if blank in inputs else set())


async def test_truncation_keeps_special_tokens(stack: Stack):
    text = Input(text="abcdef")
    cases = [(common_pb2.TRUNCATION_RIGHT, b"ab"), (common_pb2.TRUNCATION_LEFT, b"ef")]
    for truncation, kept in cases:
        assert await inputs_of(stack, request(text, truncation=truncation, max_tokens=3)) == [[BOS, *kept]]
    ids = Input(token_ids=Ids(ids=[1, 2, 3, 4]))
    assert await inputs_of(stack, request(ids, truncation=common_pb2.TRUNCATION_LEFT, max_tokens=2)) == [[3, 4]]
    for truncation in (common_pb2.TRUNCATION_NONE, common_pb2.TRUNCATION_UNSPECIFIED):
        failure = await failure_of(stack.embed.Embed(request(text, truncation=truncation, max_tokens=3)))
        assert "has 7 tokens; allowed: at most 3" in failure.violations["inputs[0]"]


async def test_prompts(stack: Stack):
    text = Input(text="a")
    assert await inputs_of(stack, request(text)) == [[BOS, *b"a"]]
    assert await inputs_of(stack, request(text, prompt_name="query")) == [[BOS, *b"q: a"]]
    assert await inputs_of(stack, request(text, prompt="p ")) == [[BOS, *b"p a"]]
    # The encoder has a default prompt; token ids are left alone by it, and an empty name switches it off.
    encoder = stack.encoder.engine
    ids = Input(token_ids=Ids(ids=[9]))
    await stack.embed.Embed(request(text, ids, model="encoder"))
    await stack.embed.Embed(request(text, model="encoder", prompt_name=""))
    assert [job.inputs for job in encoder.embedded] == [[[BOS, *b"q: a"], [9]], [[BOS, *b"a"]]]


async def test_bad_inputs_leave_the_others(stack: Stack):
    inputs = [Input(text="a"), Input(text=" "), Input(token_ids=Ids(ids=[POISON])), Input(), Input(text="b")]
    answer = await stack.embed.Embed(request(*inputs))
    assert [result.index for result in answer.results] == [0, 1, 2, 3, 4]
    kinds = [result.WhichOneof("result") for result in answer.results]
    assert kinds == ["dense", "error", "error", "error", "dense"]
    failures = [unpack(answer.results[i].error) for i in (1, 2, 3)]
    assert [failure.reason for failure in failures] == ["INVALID_FIELD", "COMPUTE_FAULT", "INVALID_FIELD"]
    assert list(failures[0].violations) == ["inputs[1].text"]
    np.testing.assert_array_equal(np.float32(answer.results[4].dense.values), vector_of([BOS, *b"b"], 12))
    assert answer.usage.prompt_tokens == 4


async def test_a_request_of_faults_alone_fails_whole(stack: Stack):
    failure = await failure_of(stack.embed.Embed(request(Input(token_ids=Ids(ids=[POISON])))))
    assert failure.code is grpc.StatusCode.INTERNAL
