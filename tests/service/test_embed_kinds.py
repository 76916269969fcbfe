"""Embed: sparse and per-token embeddings, what their options mean, duplicates, prompts that are not pooled."""

from __future__ import annotations

import threading

import grpc
import numpy as np
import pytest

from pyruntime.service.embed_inputs import prompt_rows
from pyruntime.service.embed_vectors import encode, vector_bytes
from pyruntime.types import Capability, EmbeddingKind, EmbedRequest, QueryExpansion, SparseVector
from pyruntime.v1 import common_pb2, embed_pb2, model_pb2
from tests.fakes import BOS, EOS, MARK, POISON, byte_tokenizer, vector_of
from tests.service.conftest import SETTINGS, Stack, failure_of, unpack
from tests.service.embed_help import WIDTH, fake_values, serve

Code = grpc.StatusCode
Ids = common_pb2.TokenIds
Input = common_pb2.Input
SPARSE, PER_TOKEN = embed_pb2.EMBEDDING_KIND_SPARSE, embed_pb2.EMBEDDING_KIND_PER_TOKEN
ENCODINGS = [number for number in embed_pb2.Encoding.values() if number]


@pytest.fixture
def kinds(stack: Stack) -> Stack:
    """A third model that has every kind."""
    serve(stack, "kinds", {Capability.EMBED, Capability.SPARSE_EMBED}, embedding_kinds=frozenset(EmbeddingKind))
    return stack


def request(*inputs: Input, **fields) -> embed_pb2.EmbedRequest:
    return embed_pb2.EmbedRequest(**{"model": "kinds", "inputs": inputs or [Input(text="a")]} | fields)


async def test_per_token_vectors(kinds: Stack):
    answer = await kinds.embed.Embed(request(Input(text="abc"), Input(token_ids=Ids(ids=[5, 6])), kind=PER_TOKEN))
    for result, ids in zip(answer.results, ([BOS, *b"abc"], [5, 6]), strict=True):
        got = np.float32([vector.values for vector in result.tokens.vectors])
        np.testing.assert_array_equal(got, fake_values(ids, EmbeddingKind.PER_TOKEN))
        assert {vector.dimensions for vector in result.tokens.vectors} == {WIDTH}
        assert result.prompt_tokens == len(ids)
    answer = await kinds.embed.Embed(request(kind=PER_TOKEN, dimensions=2, normalize=False, truncation=1))
    assert [len(vector.values) for vector in answer.results[0].tokens.vectors] == [2, 2]


async def test_sparse_weights(kinds: Stack):
    answer = await kinds.embed.Embed(request(Input(text="aba"), Input(token_ids=Ids(ids=[POISON])), kind=SPARSE))
    assert list(answer.results[0].sparse.token_ids) == [97, 98, BOS]
    assert list(answer.results[0].sparse.weights) == [25.25, 25.5, 65.0]
    assert unpack(answer.results[1].error).reason == "COMPUTE_FAULT"
    assert answer.usage.prompt_tokens == 4


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("tokens", [0, 1, 3, 200])
@pytest.mark.parametrize("width", [1, 33])
def test_token_vectors_are_written_as_each_vector_alone(encoding: int, tokens: int, width: int):
    """Against one vector at a time, and those against protobuf's own writing of its fields."""
    matrix = np.random.default_rng(tokens).standard_normal((tokens, width)).astype(np.float32)
    matrix[:1] = 0
    (payload,) = encode(EmbeddingKind.PER_TOKEN, [matrix], encoding)
    got = embed_pb2.TokenEmbeddings.FromString(payload)
    alone = encode(EmbeddingKind.DENSE, list(matrix), encoding)
    assert [vector.SerializeToString() for vector in got.vectors] == [
        embed_pb2.DenseEmbedding.FromString(each).SerializeToString() for each in alone
    ]
    for vector, row in zip(got.vectors, matrix, strict=True):
        fields = {"values": vector.values, "packed": vector.packed, "dimensions": width, "scale": vector.scale}
        again = embed_pb2.DenseEmbedding(**fields)
        assert again == vector
        assert len(vector.values) == (width if encoding == embed_pb2.ENCODING_FLOAT else 0)
        if encoding == embed_pb2.ENCODING_INT8:
            numbers = np.frombuffer(vector.packed, np.int8).astype(np.float64) * vector.scale
            assert np.abs(numbers - row).max() <= np.abs(row).max() / 127
    assert all(vector_bytes(width, encoding) == len(payload) / tokens for _ in range(min(tokens, 1)))


def test_a_matrix_that_is_not_contiguous_is_written_as_its_copy():
    matrix = np.random.default_rng(0).standard_normal((4, 10)).astype(np.float32)
    for view in (matrix[::2, 1::3], matrix.T, matrix.astype(">f4")):
        for encoding in ENCODINGS:
            copy = np.ascontiguousarray(view, np.float32)
            kind = EmbeddingKind.PER_TOKEN
            assert encode(kind, [view], encoding) == encode(kind, [copy], encoding)


def test_an_empty_sparse_vector_is_an_answer_all_the_same():
    empty = SparseVector(np.zeros(0, np.int64), np.zeros(0, np.float32))
    result = embed_pb2.EmbedResult(index=0)
    (payload,) = encode(EmbeddingKind.SPARSE, [empty], embed_pb2.ENCODING_FLOAT)
    result.sparse.ParseFromString(payload)
    assert result.WhichOneof("result") == "sparse"


@pytest.mark.parametrize("kind", [SPARSE, PER_TOKEN])
async def test_large_answers_are_written_off_the_event_loop(kinds: Stack, monkeypatch, kind):
    """Those of texts that were computed once and are answered often as well."""
    threads = []

    def noted(*arguments):
        threads.append(threading.current_thread().name)
        return encode(*arguments)

    monkeypatch.setattr("pyruntime.service.embed.encode", noted)
    monkeypatch.setattr("pyruntime.service.embed._INLINE_BYTES", 100)
    for inputs in ([Input(text="ab")], [Input(text="ab")] * 8):
        answer = await kinds.embed.Embed(request(*inputs, kind=kind))
        assert not any(result.HasField("error") for result in answer.results)
    loop = threading.current_thread().name
    assert threads[0] == loop
    assert threads[1] != loop


async def test_one_number_too_large_for_float16_is_that_inputs_error(kinds: Stack, monkeypatch):
    def huge(ids: list[int], dimensions: int) -> np.ndarray:
        return np.full(dimensions, 65519.0 if 98 not in ids else 65520.0, np.float32)

    monkeypatch.setattr("tests.fakes.vector_of", huge)
    fields = {"kind": PER_TOKEN, "encoding": embed_pb2.ENCODING_FLOAT16_LE}
    answer = await kinds.embed.Embed(request(Input(text="a"), Input(text="ab"), **fields))
    assert np.frombuffer(answer.results[0].tokens.vectors[0].packed, "<f2").tolist() == [65504.0] * WIDTH
    assert list(unpack(answer.results[1].error).violations) == ["encoding"]


@pytest.mark.parametrize(
    ("fields", "field", "says"),
    [
        ({"kind": SPARSE, "pooling": embed_pb2.POOLING_MEAN}, "pooling", "has no meaning for EMBEDDING_KIND_SPARSE"),
        ({"kind": SPARSE, "normalize": False}, "normalize", "no meaning"),
        ({"kind": SPARSE, "dimensions": 3}, "dimensions", "no meaning"),
        ({"kind": SPARSE, "encoding": embed_pb2.ENCODING_INT8}, "encoding", "no meaning"),
        ({"kind": PER_TOKEN, "pooling": embed_pb2.POOLING_CLS}, "pooling", "no meaning"),
        ({"kind": PER_TOKEN, "dimensions": WIDTH + 1}, "dimensions", f"allowed: 1 to {WIDTH}"),
        ({"kind": PER_TOKEN, "dimensions": 0}, "dimensions", "0 is out of range"),
    ],
)
async def test_options_without_a_meaning_are_refused(kinds: Stack, fields, field, says):
    failure = await failure_of(kinds.embed.Embed(request(**fields)))
    assert failure.code is Code.INVALID_ARGUMENT
    assert says in failure.violations[field]
    assert (await kinds.embed.Embed(request(kind=SPARSE, encoding=embed_pb2.ENCODING_FLOAT))).results


async def test_kinds_that_a_model_lacks(kinds: Stack):
    serve(kinds, "sparse", {Capability.SPARSE_EMBED}, embedding_kinds=frozenset({EmbeddingKind.SPARSE}))
    for fields, says in (
        ({"model": "decoder", "kind": PER_TOKEN}, "model 'decoder' has no PER_TOKEN embeddings; it has: DENSE"),
        ({"model": "decoder", "kind": SPARSE}, "model 'decoder' cannot SPARSE_EMBED; it can: EMBED, GENERATE"),
        ({"model": "sparse"}, "model 'sparse' cannot EMBED; it can: SPARSE_EMBED"),
    ):
        failure = await failure_of(kinds.embed.Embed(request(**fields)))
        assert (failure.code, failure.reason) == (Code.FAILED_PRECONDITION, "CAPABILITY_MISSING")
        assert says in failure.message
    model = await kinds.models.GetModel(model_pb2.GetModelRequest(model="sparse"))
    assert (list(model.embedding_kinds), model.embedding_dimensions, model.pooling) == ([SPARSE], 0, 0)


async def test_a_kind_finds_the_only_model_that_has_it(kinds: Stack):
    assert (await kinds.embed.Embed(request(model="", kind=SPARSE))).model == "kinds"


async def test_too_many_token_vectors_are_refused_before_the_work(kinds: Stack):
    engine = kinds.registry.resolve("kinds", Capability.EMBED).engine
    kinds.server._room.settings = SETTINGS.model_copy(update={"max_message_bytes": 2000})
    most = (2000 - 512 - 32) // vector_bytes(WIDTH, embed_pb2.ENCODING_FLOAT)
    for each in (Input(token_ids=Ids(ids=[5] * (most + 1))), Input(text="a" * most)):  # <s> is put before a text
        failure = await failure_of(kinds.embed.Embed(request(each, kind=PER_TOKEN)))
        assert f"{most + 1} vectors make a response of" in failure.violations["inputs"]
        assert "allowed: at most 2000 (max_message_bytes)" in failure.violations["inputs"]
    assert engine.embedded == []
    fits = Input(token_ids=Ids(ids=[5] * most))
    assert (await kinds.embed.Embed(request(fits, kind=PER_TOKEN))).ByteSize() < 2000


async def test_duplicates_are_computed_once(stack: Stack):
    inputs = [Input(text="a"), Input(text="b"), Input(token_ids=Ids(ids=[BOS, 97])), Input(text=" "), Input(text="a")]
    answer = await stack.embed.Embed(request(*inputs, model="decoder"))
    assert stack.engine.embedded[-1].inputs == [[BOS, 97], [BOS, 98]]
    assert stack.engine.embedded[-1].skip_rows is None
    for place in (0, 2, 4):
        np.testing.assert_array_equal(np.float32(answer.results[place].dense.values), vector_of([BOS, 97], 12))
        assert answer.results[place].prompt_tokens == 2
    assert answer.results[3].HasField("error")
    assert (answer.usage.prompt_tokens, answer.usage.cached_tokens) == (8, 4)
    poison = Input(token_ids=Ids(ids=[POISON]))
    answer = await stack.embed.Embed(request(poison, Input(text="a"), poison, model="decoder"))
    assert [result.WhichOneof("result") for result in answer.results] == ["error", "dense", "error"]


@pytest.fixture
def unpooled(stack: Stack) -> Stack:
    """A model whose prompts are read but not pooled."""
    serve(stack, "unpooled", {Capability.EMBED}, prompt_is_pooled=False)
    return stack


async def skips(stack: Stack, *inputs: Input, **fields) -> tuple[list[list[int]], list[int] | None]:
    model = stack.registry.resolve("unpooled", Capability.EMBED)
    await stack.embed.Embed(request(*inputs, model="unpooled", **fields))
    job = model.engine.embedded[-1]
    return job.inputs, job.skip_rows


async def test_prompts_that_are_not_pooled(unpooled: Stack):
    text = Input(text="abc")
    assert await skips(unpooled, text) == ([[BOS, *b"abc"]], None)
    assert await skips(unpooled, text, prompt_name="query") == ([[BOS, *b"q: abc"]], [4])
    # The special token at the start stays when the left end is cut, and what is left of the prompt is skipped.
    left = {"prompt": "pp", "truncation": common_pb2.TRUNCATION_LEFT}
    assert await skips(unpooled, text, max_tokens=5, **left) == ([[BOS, *b"pabc"]], [2])
    assert await skips(unpooled, text, max_tokens=3, **left) == ([[BOS, *b"bc"]], [1])
    right = {"prompt": "pp", "truncation": common_pb2.TRUNCATION_RIGHT}
    assert await skips(unpooled, text, max_tokens=4, **right) == ([[BOS, *b"ppa"]], [3])
    failure = await failure_of(unpooled.embed.Embed(request(text, model="unpooled", max_tokens=3, **right)))
    assert "has 3 tokens, none of them behind its prompt's 3" in failure.violations["inputs[0]"]
    failure = await failure_of(unpooled.embed.Embed(request(text, model="unpooled", max_tokens=4, prompt="p")))
    assert "has 5 tokens; allowed: at most 4" in failure.violations["inputs[0]"]


async def test_the_same_tokens_with_and_without_a_prompt_are_two_inputs(stack: Stack):
    serve(stack, "unpooled", {Capability.EMBED}, prompt_is_pooled=False, default_prompt_name="query")
    ids = Input(token_ids=Ids(ids=[BOS, *b"q: a"]))
    assert await skips(stack, Input(text="a"), ids, ids) == ([[BOS, *b"q: a"]] * 2, [4, 0])


async def late(stack: Stack, *inputs: Input, **fields) -> EmbedRequest:
    """What reaches the engine of a late-interaction model, which lengthens queries to six tokens."""
    model = stack.registry.resolve("late", Capability.EMBED)
    await stack.embed.Embed(request(*inputs, model="late", **{"kind": PER_TOKEN} | fields))
    return model.engine.embedded[-1]


def serve_late(stack: Stack, cut_to: int | None = 6, attended: bool = True, length: int = 6, **facts: object) -> None:
    expansion = QueryExpansion(MARK, length, cut_to, attended)
    facts = {
        "embedding_kinds": frozenset(EmbeddingKind),
        "query_expansion": expansion,
        "late_interaction": True,
    } | facts
    serve(stack, "late", {Capability.EMBED}, **facts)


@pytest.mark.parametrize("attended", [True, False])
@pytest.mark.parametrize("cut_to", [6, 8, None])
async def test_queries_of_a_late_interaction_model(stack: Stack, cut_to, attended):
    serve_late(stack, cut_to, attended, prompts={"query": "q "})
    short, long = Input(text="a"), Input(text="abcdefg")
    job = await late(stack, short, long, prompt_name="query")
    whole = [BOS, *b"q abcdefg"]
    assert (job.inputs, job.as_query) == ([[BOS, *b"q a", MARK, MARK], whole[:cut_to]], True)
    assert job.unattended == (None if attended else [2, 0])
    for fields in ({}, {"prompt_name": "document"}, {"prompt": "q "}):
        job = await late(stack, short, **fields)
        assert (job.inputs, job.as_query) == ([[BOS, *fields.get("prompt", "").encode(), *b"a"]], False)
    job = await late(stack, short, kind=embed_pb2.EMBEDDING_KIND_DENSE, prompt_name="query")
    assert (job.inputs, job.as_query) == ([[BOS, *b"q a"]], False)
    failure = await failure_of(stack.embed.Embed(request(model="late", prompt_name="other")))
    assert failure.code is Code.NOT_FOUND
    assert "known: document, query" in failure.message


async def test_a_query_is_not_the_text_that_ends_in_its_marks(stack: Stack):
    """The same tokens, but the others see the last ones."""
    serve_late(stack, attended=False, prompts={"query": "q "})
    job = await late(stack, Input(text="a"), Input(text="a<mark><mark>"), prompt_name="query")
    assert (job.inputs, job.unattended) == ([[BOS, *b"q a", MARK, MARK]] * 2, [2, 0])


async def test_queries_longer_than_the_context_are_refused(stack: Stack):
    serve_late(stack, length=65)
    refused = request(model="late", kind=PER_TOKEN, prompt_name="query")
    failure = await failure_of(stack.embed.Embed(refused))
    assert (failure.code, failure.reason) == (Code.FAILED_PRECONDITION, "CAPABILITY_MISSING")
    assert (await late(stack, Input(text="a"), prompt_name="document")).inputs == [[BOS, 97]]


def test_a_special_token_at_the_end_of_a_prompt_is_not_of_it():
    from tokenizers import processors

    tokenizer = byte_tokenizer()
    assert prompt_rows(tokenizer, "ab") == 3
    frame = {"single": "<s> $A </s>", "special_tokens": [("<s>", BOS), ("</s>", EOS)]}
    tokenizer._backend.post_processor = processors.TemplateProcessing(**frame)
    assert prompt_rows(tokenizer, "ab") == 3
