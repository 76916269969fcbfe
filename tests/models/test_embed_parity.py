"""MiniLM's real weights against sentence-transformers, in any batching."""

import asyncio
import random

import numpy as np
import pytest
import torch

from pyruntime.types import EmbedRequest, PoolingType
from tests.models.texts import WORDS

NUM_TEXTS = 100


@pytest.fixture(scope="module")
def texts(folders):
    """Texts whose lengths, special tokens included, spread from 3 to 256 tokens."""
    generator = random.Random(5)
    return [
        " ".join(generator.choice(WORDS) for _ in range(1 + (253 * i) // (NUM_TEXTS - 1))) for i in range(NUM_TEXTS)
    ]


@pytest.fixture(scope="module")
def reference(folders, texts):
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(folders["all-minilm-l6-v2"], device="cpu")
    return model.encode(texts, batch_size=8)


async def embed(model, ids, group):
    batches = [ids[start : start + group] for start in range(0, len(ids), group)]
    answers = await asyncio.gather(
        *(model.engine.embed(EmbedRequest(batch, PoolingType.MEAN, True, 384)) for batch in batches)
    )
    return np.stack([result.values for results, _ in answers for result in results])


@pytest.mark.parametrize(("dtype", "least"), [("float32", 0.99999), ("bfloat16", 0.9995)])
@pytest.mark.parametrize("group", [1, 7, NUM_TEXTS])
async def test_cosine(served, texts, reference, dtype, least, group):
    model = served("all-minilm-l6-v2", dtype)
    ids = model.tokenizer.encode_batch(texts)
    assert (min(map(len, ids)), max(map(len, ids))) == (3, 256)
    vectors = await embed(model, ids, group)
    cosines = (vectors * reference).sum(axis=1)
    assert cosines.min() >= least
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-5)


@pytest.mark.parametrize("pooling", list(PoolingType))
async def test_pooling_normalise_and_dimensions(served, folders, pooling):
    from transformers import AutoModel

    model = served("all-minilm-l6-v2", "float32")
    eager = AutoModel.from_pretrained(folders["all-minilm-l6-v2"], attn_implementation="eager").eval()
    ids = model.tokenizer.encode("a quiet river between two cities")
    hidden = eager(input_ids=torch.tensor([ids])).last_hidden_state[0]
    row = {PoolingType.LAST: hidden[-1], PoolingType.CLS: hidden[0], PoolingType.MEAN: hidden.mean(0)}[pooling]
    for normalize, width in ((False, 384), (True, 384), (True, 100), (False, 1)):
        (result,), _ = await model.engine.embed(EmbedRequest([ids], pooling, normalize, width))
        expected = torch.nn.functional.normalize(row[:width], dim=0) if normalize else row[:width]
        np.testing.assert_allclose(result.values, expected.numpy(), atol=2e-5)
