"""Rerank by vectors a token, over a real channel, against MaxSim in float64 of sentence-transformers' vectors."""

import numpy as np
import pytest
import torch
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Transformer

from pyruntime.rerank_template import RerankWay, rerank_way
from tests.models.rank_folders import by_index, channel_to, rerank
from tests.models.recorder import record
from tests.models.sentence_folders import TEXTS, body_folder, serve

QUERIES = ["light river answer", "The quiet city, between two rivers!", " ".join(["winter grows"] * 14)]
REFERENCE = "float64 MaxSim of sentence-transformers' vectors, difference of a score"


FIXED = {"strategy": "fixed", "length": 12, "token": "[MASK]"}
QUERY_RULES = {
    "attended": {"query_expansion": FIXED | {"attend": True}},
    "unattended": {"query_expansion": FIXED | {"attend": False}},
    "at least": {"query_expansion": FIXED | {"strategy": "min", "attend": True}, "query_length": 17},
    "cut alone": {"query_length": 9},
}


def folder_of(tmp_path, rule: str):
    """A random BERT whose queries are cut and lengthened by a rule."""
    options = {"bias": False, "activation_function": torch.nn.Identity(), "module_input_name": "token_embeddings"}
    torch.manual_seed(3)
    modules = [
        Transformer(str(body_folder(tmp_path / "body")), **QUERY_RULES[rule]),
        Dense(64, 32, **options),
        MultiVectorMask(skiplist_words=[".", ",", "!"]),
        Normalize(module_input_name="token_embeddings"),
    ]
    prompts = {"query": "query ", "document": "answer: "}
    reference = MultiVectorEncoder(modules=modules, device="cpu", prompts=prompts)
    reference.save_pretrained(str(tmp_path / "model"), create_model_card=False)
    return tmp_path / "model", reference


@pytest.mark.parametrize("rule", QUERY_RULES)
async def test_max_sim(tmp_path, rule):
    """Tokens that lengthen a query are seen by the others, or only see them."""
    folder, reference = folder_of(tmp_path, rule)
    model = serve(folder)
    documents = [each for each in TEXTS if len(each.split()) < 50]
    vectors = [np.asarray(each, np.float64) for each in reference.encode_document(documents, batch_size=1)]
    worst = 0.0
    try:
        assert rerank_way(model.info, None) is RerankWay.LATE_INTERACTION
        async with channel_to(model) as stub:
            for query, asked in zip(QUERIES, reference.encode_query(QUERIES, batch_size=1), strict=True):
                own = by_index(await stub.Rerank(rerank(*documents, query=query)))
                expected = [(np.asarray(asked, np.float64) @ each.T).max(axis=1).sum() for each in vectors]
                worst = max(worst, float(np.abs(np.subtract(own, expected)).max()))
    finally:
        model.engine.close()
    assert worst <= 1e-4
    record(model.info.architecture, "packed", f"late interaction, queries {rule}", REFERENCE, worst)
