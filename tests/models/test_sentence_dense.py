"""Folders that sentence-transformers writes, served, against its own ``encode`` one text at a time."""

import json

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, LayerNorm, Normalize, Pooling, Transformer

from pyruntime.types import EmbeddingKind, PoolingType
from tests.models.recorder import record
from tests.models.sentence_folders import (
    BERT,
    GEMMA,
    MPNET,
    QWEN3,
    T5,
    TEXTS,
    body_folder,
    embed,
    least_cosine,
    serve,
    tokenized,
)

HIDDEN = 64


def dense(takes, gives, activation, **options):
    return Dense(takes, gives, activation_function=activation, **options)


STACKS = {
    "MEAN": (BERT, "mean", lambda: [Normalize()]),
    "CLS": (BERT, "cls", list),
    "LAST, an end token": (QWEN3, "lasttoken", lambda: [Normalize()]),
    "MEAN of a decoder": (QWEN3, "mean", lambda: [Normalize()]),
    "MEAN, two Dense": (
        BERT,
        "mean",
        lambda: [
            dense(HIDDEN, 192, torch.nn.Identity(), bias=False),
            dense(192, 48, torch.nn.Identity(), bias=False),
            Normalize(),
        ],
    ),
    "MEAN, two Dense (EmbeddingGemma)": (
        GEMMA,
        "mean",
        lambda: [
            dense(HIDDEN, 256, torch.nn.Identity(), bias=False),
            dense(256, HIDDEN, torch.nn.Identity(), bias=False),
            Normalize(),
        ],
    ),
    "MEAN, Dense (sentence-t5)": (
        T5,
        "mean",
        lambda: [dense(HIDDEN, 48, torch.nn.Identity(), bias=False), Normalize()],
    ),
    "MEAN (MPNet)": (MPNET, "mean", lambda: [Normalize()]),
    "CLS, Dense with tanh": (BERT, "cls", lambda: [dense(HIDDEN, 40, torch.nn.Tanh())]),
    "MEAN, Normalize, Dense, LayerNorm, Dense": (
        BERT,
        "mean",
        lambda: [
            Normalize(),
            dense(HIDDEN, HIDDEN, torch.nn.GELU(), use_residual=True),
            LayerNorm(HIDDEN),
            dense(HIDDEN, 24, torch.nn.ReLU(), use_residual=True),
            Normalize(),
        ],
    ),
}


def write(tmp_path, kind, mode, behind, pooling=None, ends_alone=False, **options):
    body = body_folder(tmp_path / "body", kind, ends_alone)
    torch.manual_seed(1)
    modules = [Transformer(str(body)), Pooling(HIDDEN, pooling_mode=mode, **(pooling or {})), *behind()]
    model = SentenceTransformer(modules=modules, device="cpu", **options)
    model.save_pretrained(str(tmp_path / "model"), create_model_card=False)
    return tmp_path / "model", model


# Least cosine to sentence-transformers in float32. T5 divides no attention score by the root of the width, so that
# random weights magnify rounding: its own bfloat16 is as far from its float32.
LEAST = {"float32": 0.99999, "bfloat16": 0.9995}
LEAST_OF_T5 = LEAST | {"bfloat16": 0.998}


@pytest.mark.parametrize("stack", STACKS)
async def test_encode_is_equalled(tmp_path, stack):
    kind, mode, behind = STACKS[stack]
    folder, reference = write(tmp_path, kind, mode, behind, ends_alone=mode == "lasttoken")
    expected = reference.encode(TEXTS, batch_size=1)
    for dtype, least in (LEAST_OF_T5 if kind is T5 else LEAST).items():
        model = serve(folder, dtype=dtype)
        try:
            assert model.info.context_length == 64
            ids = tokenized(model, TEXTS)
            assert max(map(len, ids)) == 64 and all(each[-1] == 3 for each in ids)
            own = await embed(model, ids)
        finally:
            model.engine.close()
        cosine = least_cosine(own, expected)
        assert cosine >= least
        # Without a Normalize the lengths count too.
        error = np.linalg.norm(np.stack(own) - expected, axis=1) / np.linalg.norm(expected, axis=1)
        assert error.max() <= np.sqrt(2 - 2 * least)
        path = model.info.execution_path.value
        record(model.info.architecture, path, stack, "sentence-transformers, 1 - cosine", 1 - cosine, dtype)


async def test_the_other_options_of_a_request_still_work_behind_dense_modules(tmp_path):
    _, _, behind = STACKS["MEAN, two Dense"]
    folder, reference = write(tmp_path, BERT, "mean", behind)
    model = serve(folder)
    try:
        ids = tokenized(model, TEXTS)
        cut = await embed(model, ids, dimensions=16)
        whole = reference.encode(TEXTS, batch_size=1, truncate_dim=16, normalize_embeddings=True)
        assert least_cosine(cut, whole) >= 0.99999
        np.testing.assert_allclose(np.linalg.norm(cut, axis=1), 1.0, atol=1e-5)
        raw = await embed(model, ids, normalize=False)
        assert np.abs(np.linalg.norm(raw, axis=1) - 1).min() > 1e-3
        # Another pooling than the folder's: the modules run on its vector.
        reference[1].pooling_mode = "cls"
        assert (
            least_cosine(await embed(model, ids, pooling=PoolingType.CLS), reference.encode(TEXTS, batch_size=1))
            >= 0.99999
        )
    finally:
        model.engine.close()


@pytest.mark.parametrize("mode", ["mean", "cls", "lasttoken"])
async def test_a_prompt_that_is_not_pooled(tmp_path, mode):
    """sentence-transformers counts the prompt's tokens with the special ones before it, without those behind it."""
    prompt = "the answer engine, "
    folder, reference = write(
        tmp_path, BERT, mode, lambda: [Normalize()], {"include_prompt": False}, prompts={"instruction": prompt}
    )
    model = serve(folder)
    try:
        assert not model.info.prompt_is_pooled and model.info.prompts["instruction"] == prompt
        skipped = len(model.tokenizer.encode(prompt)) - 1
        ids = tokenized(model, TEXTS, prompt)
        own = [(await embed(model, [each], skip_rows=[skipped]))[0] for each in ids]
        expected = reference.encode(TEXTS, batch_size=1, prompt_name="instruction")
        assert least_cosine(own, expected) >= 0.99999
        if mode != "lasttoken":
            plain = await embed(model, ids)
            assert min(float(a @ b) for a, b in zip(own, plain, strict=True)) < 0.999
    finally:
        model.engine.close()


async def test_chunks_leave_out_the_same_rows(tmp_path):
    """A decoder's long prompts go through in pieces; what is left out may end in any of them."""
    folder, _ = write(tmp_path, QWEN3, "mean", lambda: [dense(HIDDEN, 32, torch.nn.Tanh())])
    whole, cut = serve(folder, max_batch_tokens=2048), serve(folder, max_batch_tokens=16)
    try:
        ids = tokenized(whole, [TEXTS[7], TEXTS[8], TEXTS[5]])
        for pooling in PoolingType:
            for skips in (None, [0, 5, 1], [16, 17, 3], [40, 100, 2]):
                one = await embed(whole, ids, pooling=pooling, skip_rows=skips)
                many = await embed(cut, ids, pooling=pooling, skip_rows=skips)
                np.testing.assert_allclose(np.stack(one), np.stack(many), atol=1e-4)
    finally:
        whole.engine.close(), cut.engine.close()


async def test_prompts_similarity_and_widths_are_told(tmp_path):
    folder, _ = write(
        tmp_path,
        BERT,
        "mean",
        STACKS["MEAN, two Dense"][2],
        prompts={"query": "query: ", "document": ""},
        default_prompt_name="query",
        similarity_fn_name="dot",
        truncate_dim=32,
    )
    model = serve(folder)
    try:
        info = model.info
        assert info.prompts == {"query": "query: ", "document": ""} and info.default_prompt_name == "query"
        assert (info.similarity, info.embedding_dimensions, info.token_embedding_dimensions) == ("dot", 32, 48)
        assert info.embedding_kinds == {EmbeddingKind.DENSE, EmbeddingKind.PER_TOKEN}
        assert json.loads((folder / "modules.json").read_text())[2]["type"].endswith(".Dense")
    finally:
        model.engine.close()
