"""Embed and EmbedStream of real models through server and client, against sentence-transformers and one another."""

import asyncio
import contextlib
import random

import numpy as np
import pytest
import torch
from sentence_transformers import MultiVectorEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer
from sentence_transformers.sparse_encoder.modules import SpladePooling

from pyruntime.client import AsyncClient, Client
from tests.models.lent import serving
from tests.models.sentence_folders import BERT, TEXTS, body_folder, masked_lm_folder, serve
from tests.models.texts import WORDS

MINILM = "all-minilm-l6-v2"


@contextlib.asynccontextmanager
async def address_of(**models):
    """A server of these models, which stay their owners'."""
    async with serving(models) as (server, _):
        yield server.address


@pytest.fixture(scope="module")
def texts():
    """300 texts of 1 to 60 words, every tenth one seen before."""
    generator = random.Random(8)
    made = [" ".join(generator.choices(WORDS, k=generator.randint(1, 60))) for _ in range(300)]
    made[10::10] = made[:290:10]
    return made


async def test_a_stream_answers_as_embed_does(served, folders, texts):
    model = served(MINILM, "float32")
    async with address_of(**{MINILM: model}) as address:

        def work():
            with Client(address) as client:
                found = np.stack(list(client.embed_stream(iter(texts), batch_size=32))), client.embed(texts)
                left = client.embed_stream(iter(texts))
                next(left)
                left.close()
                return found

        streamed, whole = await asyncio.to_thread(work)
        for _ in range(2000):  # what was in flight of the stream that was left ends with the step
            if model.engine.num_open == 0:
                break
            await asyncio.sleep(0.005)
    assert streamed.shape == whole.shape == (300, 384)
    np.testing.assert_allclose(streamed, whole, atol=2e-6)
    reference = SentenceTransformer(folders[MINILM], device="cpu").encode(texts[::15])
    assert (streamed[::15] * reference).sum(axis=1).min() >= 0.99999
    assert (model.engine.num_open, model.engine.num_blocks_used) == (0, 0)


async def test_queries_documents_and_sparse_weights(tmp_path):
    """What a client gets without knowing anything of prompts, masks and limits but their names."""
    late, reference = late_model(tmp_path)
    sparse, splade = sparse_model(tmp_path)
    try:
        async with address_of(late=late, sparse=sparse) as address, AsyncClient(address) as client:
            options = {"model": "late", "kind": "per_token", "truncation": "right"}
            queries = await client.embed(TEXTS, prompt_name="query", **options)
            documents = await client.embed(TEXTS, prompt_name="document", **options)
            weights = await client.embed(TEXTS, model="sparse", kind="sparse", truncation="right")
    finally:
        late.engine.close()
        sparse.engine.close()
    for own, expected in zip(queries, reference.encode_query(TEXTS, batch_size=1), strict=True):
        np.testing.assert_allclose(own, expected, atol=2e-5)
    for own, expected in zip(documents, reference.encode_document(TEXTS, batch_size=1), strict=True):
        np.testing.assert_allclose(own, expected, atol=2e-5)
    for own, expected in zip(weights, splade.encode(TEXTS, batch_size=1, convert_to_sparse_tensor=False), strict=True):
        dense = np.zeros(len(expected), np.float32)
        dense[own.ids] = own.weights
        np.testing.assert_allclose(dense, expected, atol=2e-4)


async def test_a_prompt_that_is_not_pooled(tmp_path):
    body = body_folder(tmp_path / "body")
    modules = [Transformer(str(body)), Pooling(64, "mean", include_prompt=False), Normalize()]
    prompt = "the answer engine, "
    reference = SentenceTransformer(modules=modules, device="cpu", prompts={"instruction": prompt})
    reference.save_pretrained(str(tmp_path / "model"), create_model_card=False)
    model = serve(tmp_path / "model")
    try:
        async with address_of(small=model) as address, AsyncClient(address) as client:
            own = await client.embed(TEXTS, prompt_name="instruction", truncation="right")
            plain = await client.embed(TEXTS, truncation="right")
    finally:
        model.engine.close()
    expected = reference.encode(TEXTS, batch_size=1, prompt_name="instruction")
    assert (own * expected).sum(axis=1).min() >= 0.99999
    assert (plain * reference.encode(TEXTS, batch_size=1)).sum(axis=1).min() >= 0.99999


def late_model(tmp_path):
    body = body_folder(tmp_path / "late-body")
    expansion = {"strategy": "fixed", "attend": True, "length": 20, "token": "[MASK]"}
    torch.manual_seed(3)
    dense = Dense(64, 32, bias=False, activation_function=torch.nn.Identity(), module_input_name="token_embeddings")
    modules = [
        Transformer(str(body), query_expansion=expansion, document_length=40),
        dense,
        MultiVectorMask(skiplist_words=[".", ",", "!"]),
        Normalize(module_input_name="token_embeddings"),
    ]
    reference = MultiVectorEncoder(modules=modules, device="cpu", prompts={"query": "query ", "document": "answer: "})
    reference.save_pretrained(str(tmp_path / "late"), create_model_card=False)
    return serve(tmp_path / "late"), reference


def sparse_model(tmp_path):
    folder = masked_lm_folder(tmp_path / "sparse-body", *BERT)
    body = Transformer(str(folder), transformer_task="fill-mask")
    reference = SparseEncoder(modules=[body, SpladePooling("max")], device="cpu")
    reference.save_pretrained(str(tmp_path / "sparse"), create_model_card=False)
    return serve(tmp_path / "sparse"), reference
