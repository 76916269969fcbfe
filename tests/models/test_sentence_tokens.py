"""One vector a token: folders of MultiVectorEncoder and PyLate's older layout, against sentence-transformers."""

import asyncio
import json

import numpy as np
import pytest
import torch
from sentence_transformers import MultiVectorEncoder, SentenceTransformer
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer

from pyruntime.errors import ModelLoadError
from pyruntime.types import Capability, EmbeddingKind, QueryExpansion
from tests.models.recorder import record
from tests.models.sentence_folders import (
    BERT,
    MODERN,
    MPNET,
    QWEN3,
    TEXTS,
    body_folder,
    embed,
    least_cosine,
    request,
    serve,
    tokenized,
)

PER_TOKEN = EmbeddingKind.PER_TOKEN
MASK = 4


def dense(takes, gives, **options):
    return Dense(takes, gives, bias=False, activation_function=torch.nn.Identity(), **options)


def write(tmp_path, kind=BERT, transformer=None, **options):
    body = body_folder(tmp_path / "body", kind)
    torch.manual_seed(3)
    modules = [
        Transformer(str(body), **(transformer or {})),
        dense(64, 32, module_input_name="token_embeddings"),
        MultiVectorMask(skiplist_words=[".", ",", "!", "no such word"]),
        Normalize(module_input_name="token_embeddings"),
    ]
    model = MultiVectorEncoder(modules=modules, device="cpu", **options)
    model.save_pretrained(str(tmp_path / "model"), create_model_card=False)
    return tmp_path / "model", model


def expanded(ids, expansion):
    return [each[: expansion.length] + [expansion.token_id] * (expansion.length - len(each)) for each in ids]


@pytest.mark.parametrize("kind", [BERT, QWEN3], ids=["encoder", "decoder in chunks"])
async def test_documents_and_queries(tmp_path, kind):
    prompts = {"query": "query ", "document": "answer: "}
    transformer = {"query_expansion": {"strategy": "fixed", "attend": True, "length": 20, "token": "[MASK]"}}
    folder, reference = write(tmp_path, kind, transformer | {"document_length": 40}, prompts=prompts)
    model = serve(folder, max_batch_tokens=16 if kind is QWEN3 else 2048)
    try:
        info = model.info
        assert info.embedding_kinds == {PER_TOKEN} and Capability.EMBED in info.capabilities
        assert info.late_interaction and (info.token_embedding_dimensions, info.context_length) == (32, 40)
        assert info.query_expansion == QueryExpansion(MASK, 20, cut_to=20, attended=True)
        documents = await embed(model, tokenized(model, TEXTS, info.prompts["document"]), kind=PER_TOKEN)
        expected = reference.encode_document(TEXTS, batch_size=1)
        assert len(documents[-3]) < len(tokenized(model, TEXTS[-3:-2])[0]) + 3  # its comma and mark are left out
        cosine = least_cosine(documents, expected)
        assert cosine >= 0.99999
        texts = [model.tokenizer.truncate(each, 20, "head") for each in tokenized(model, TEXTS, info.prompts["query"])]
        queries = await embed(model, expanded(texts, info.query_expansion), kind=PER_TOKEN, as_query=True)
        assert {len(each) for each in queries} == {20}
        assert least_cosine(queries, reference.encode_query(TEXTS, batch_size=1)) >= 0.99999
        record(info.architecture, "packed", "one vector a token", "sentence-transformers, 1 - cosine", 1 - cosine)
    finally:
        model.engine.close()


async def test_the_older_layout_of_pylate(tmp_path):
    """Mask and normalisation are implied, prefixes are tokens, and queries are lengthened unseen."""
    folder, _ = write(tmp_path)
    modules = json.loads((folder / "modules.json").read_text())[:2]
    modules[1]["type"] = "pylate.models.Dense.Dense"
    (folder / "modules.json").write_text(json.dumps(modules))
    config = json.loads((folder / modules[1]["path"] / "config.json").read_text())
    for key in ("module_input_name", "module_output_name"):
        del config[key]
    (folder / modules[1]["path"] / "config.json").write_text(json.dumps(config))
    settings = {"model_type": "ColBERT", "query_prefix": "query ", "document_prefix": "answer ", "query_length": 24}
    settings |= {"document_length": 48, "prompts": {}, "similarity_fn_name": "MaxSim"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    reference = MultiVectorEncoder(str(folder), device="cpu")
    model = serve(folder)
    try:
        assert model.info.query_expansion == QueryExpansion(MASK, 24, cut_to=24, attended=False)
        assert model.info.prompts == {"query": "query ", "document": "answer "}
        own = await embed(model, tokenized(model, TEXTS, "answer "), kind=PER_TOKEN)
        assert least_cosine(own, reference.encode_document(TEXTS, batch_size=1)) >= 0.99999
        await check_unattended_queries(model, reference)
    finally:
        model.engine.close()


async def check_unattended_queries(model, reference):
    """Appended tokens that the text does not see, of different counts within a request, among other requests."""
    expansion = model.info.query_expansion
    texts = tokenized(model, TEXTS, model.info.prompts["query"])
    texts = [model.tokenizer.truncate(each, expansion.length, "head") for each in texts]
    counts = [expansion.length - len(each) for each in texts]
    asked = request(model.info, expanded(texts, expansion), kind=PER_TOKEN, as_query=True, unattended=counts)
    (answers, _), _ = await asyncio.gather(model.engine.embed(asked), embed(model, texts, kind=PER_TOKEN))
    expected = reference.encode_query(TEXTS, batch_size=1)
    assert least_cosine([answer.values for answer in answers], expected) >= 0.99999


@pytest.mark.parametrize("kind", [MODERN, MPNET], ids=["two-sided window", "padded"])
async def test_unattended_queries_of_other_encoders(tmp_path, kind):
    transformer = {"query_expansion": {"strategy": "min", "attend": False, "length": 20, "token": "[MASK]"}}
    folder, reference = write(tmp_path, kind, transformer)
    model = serve(folder)
    try:
        texts = tokenized(model, TEXTS)
        counts = [max(0, 20 - len(each)) for each in texts]
        long = [each + [MASK] * count for each, count in zip(texts, counts, strict=True)]
        asked = request(model.info, long, kind=PER_TOKEN, as_query=True, unattended=counts)
        answers, _ = await model.engine.embed(asked)
        expected = reference.encode_query(TEXTS, batch_size=1)
        assert least_cosine([answer.values for answer in answers], expected) >= 0.99999
    finally:
        model.engine.close()


def test_appended_tokens_beyond_a_window_are_refused(tmp_path):
    transformer = {"query_expansion": {"strategy": "min", "attend": False, "length": 26, "token": "[MASK]"}}
    folder, _ = write(tmp_path, MODERN, transformer)
    with pytest.raises(ModelLoadError, match=r"ModernBertModel: query_expansion of 26 tokens .* window of 25"):
        serve(folder)


async def test_models_that_pool_give_tokens_too(tmp_path):
    """Their modules run on each token, which is what sentence-transformers makes of such a folder for MaxSim."""
    body = body_folder(tmp_path / "body")
    torch.manual_seed(5)
    modules = [Transformer(str(body)), Pooling(64), dense(64, 48), Normalize()]
    SentenceTransformer(modules=modules, device="cpu").save_pretrained(str(tmp_path / "model"), create_model_card=False)
    reference = MultiVectorEncoder(str(tmp_path / "model"), device="cpu")
    model, plain = serve(tmp_path / "model"), serve(body)
    try:
        ids = tokenized(model, TEXTS)
        own = await embed(model, ids, kind=PER_TOKEN)
        assert least_cosine(own, reference.encode(TEXTS, batch_size=1)) >= 0.99999
        rows = await embed(plain, ids, kind=PER_TOKEN, normalize=False)
        raw = SentenceTransformer(modules=[modules[0]], device="cpu").encode(
            TEXTS, batch_size=1, output_value="token_embeddings"
        )
        for ours, theirs in zip(rows, raw, strict=True):
            np.testing.assert_allclose(ours, theirs.numpy(), atol=1e-4)
        cut = await embed(model, ids, kind=PER_TOKEN, dimensions=8)
        assert all(each.shape[1] == 8 and np.allclose(np.linalg.norm(each, axis=1), 1, atol=1e-5) for each in cut)
    finally:
        model.engine.close(), plain.engine.close()
