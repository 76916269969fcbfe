"""SPLADE folders against sentence-transformers' SparseEncoder, and BGE-M3's layout against its formula in float64."""

import asyncio
import json

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer, SparseEncoder
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from sentence_transformers.sparse_encoder.modules import SpladePooling
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM

from pyruntime.errors import ModelLoadError
from pyruntime.model.masked_lm import masked_lm_head
from pyruntime.types import Capability, EmbeddingKind
from tests.models.recorder import record
from tests.models.sentence_folders import (
    BERT,
    COMMON,
    TEXTS,
    body_folder,
    embed,
    least_cosine,
    masked_lm_folder,
    serve,
    tokenized,
)

ROBERTA = COMMON | {"max_position_embeddings": 130, "pad_token_id": 0, "type_vocab_size": 1}
HEADS = {
    "bert": COMMON,
    "roberta": ROBERTA,
    "distilbert": {"vocab_size": COMMON["vocab_size"], "dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 96},
    "electra": COMMON | {"embedding_size": 32},
    "albert": COMMON | {"embedding_size": 32},
}
SPARSE = EmbeddingKind.SPARSE


def write(tmp_path, model_type="bert", pooling=None, **options):
    body = masked_lm_folder(tmp_path / "body", model_type, HEADS[model_type])
    modules = [Transformer(str(body), transformer_task="fill-mask"), SpladePooling(**(pooling or {}))]
    model = SparseEncoder(modules=modules, device="cpu", **options)
    model.save_pretrained(str(tmp_path / "model"), create_model_card=False)
    return tmp_path / "model", model


def dense(vectors, width=COMMON["vocab_size"]):
    out = np.zeros((len(vectors), width))
    for row, (ids, weights) in zip(out, vectors, strict=True):
        assert ids.dtype == np.int64 and weights.dtype == np.float32
        assert (np.diff(ids) > 0).all() and (weights > 0).all()
        row[ids] = weights
    return out


@pytest.mark.parametrize("model_type", HEADS)
async def test_splade_equals_sparse_encoder(tmp_path, model_type):
    folder, reference = write(tmp_path, model_type)
    model = serve(folder)
    try:
        assert model.info.embedding_kinds == {SPARSE}
        assert Capability.SPARSE_EMBED in model.info.capabilities and Capability.EMBED not in model.info.capabilities
        own = dense(await embed(model, tokenized(model, TEXTS), kind=SPARSE))
        expected = reference.encode(TEXTS, batch_size=1, convert_to_sparse_tensor=False).numpy()
        assert (expected > 0).any() and (expected == 0).any()
        np.testing.assert_allclose(own, expected, rtol=1e-3, atol=1e-4)
        difference = 1 - least_cosine(list(own), expected)
        path = model.info.execution_path.value
        record(model.info.architecture, path, "SPLADE", "sentence-transformers, 1 - cosine", difference)
    finally:
        model.engine.close()


async def test_the_second_logarithm_the_largest_entries_and_the_older_module(tmp_path):
    folder, reference = write(tmp_path, pooling={"activation_function": "log1p_relu"}, max_active_dims=7)
    modules = json.loads((folder / "modules.json").read_text())
    modules[0]["type"] = "sentence_transformers.sparse_encoder.models.MLMTransformer"
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 64, "do_lower_case": false}')
    model = serve(folder)
    try:
        found = await embed(model, tokenized(model, TEXTS), kind=SPARSE)
        assert all(len(ids) <= 7 for ids, _ in found)
        expected = reference.encode(TEXTS, batch_size=1, convert_to_sparse_tensor=False).numpy()
        np.testing.assert_allclose(dense(found), expected, rtol=1e-3, atol=1e-4)
    finally:
        model.engine.close()


async def test_a_head_that_does_not_do_what_its_parts_say_is_refused(tmp_path, monkeypatch):
    from transformers.models.bert import modeling_bert

    folder, _ = write(tmp_path)
    right = modeling_bert.BertOnlyMLMHead.forward
    monkeypatch.setattr(modeling_bert.BertOnlyMLMHead, "forward", lambda self, rows: right(self, rows) * 1.1)
    with pytest.raises(ModelLoadError, match="BertForMaskedLM: the masked-language-model head as taken apart differs"):
        serve(folder)


def test_a_decoder_of_another_shape_is_refused_by_name():
    fields = COMMON | {"embedding_size": 32, "intra_bottleneck_size": 64, "true_hidden_size": 64}
    model = AutoModelForMaskedLM.from_config(AutoConfig.for_model("mobilebert", **fields))
    with pytest.raises(ModelLoadError, match=r"MobileBertForMaskedLM: .* head cannot be taken apart"):
        masked_lm_head(model)


@pytest.fixture(scope="module")
def bge(tmp_path_factory):
    """The FlagEmbedding layout: a folder of sentence-transformers with two more heads."""
    root = tmp_path_factory.mktemp("bge")
    body = body_folder(root / "body", BERT)
    modules = [Transformer(str(body)), Pooling(64, pooling_mode="cls"), Normalize()]
    reference = SentenceTransformer(modules=modules, device="cpu")
    folder = root / "model"
    reference.save_pretrained(str(folder), create_model_card=False)
    torch.manual_seed(2)
    sparse, tokens = torch.nn.Linear(64, 1), torch.nn.Linear(64, 48)
    torch.save(sparse.state_dict(), folder / "sparse_linear.pt")
    torch.save(tokens.state_dict(), folder / "colbert_linear.pt")
    eager = AutoModel.from_pretrained(folder, attn_implementation="eager").double().eval()
    model = serve(folder)
    yield model, reference, eager, sparse.double(), tokens.double()
    model.engine.close()


def lexical(eager, linear, ids):
    """FlagEmbedding's rule, token by token."""
    hidden = eager(input_ids=torch.tensor([ids])).last_hidden_state[0]
    weights: dict[int, float] = {}
    for token, weight in zip(ids, torch.relu(linear(hidden))[:, 0].tolist(), strict=True):
        if token not in (0, 1, 2, 3) and weight > 0:
            weights[token] = max(weight, weights.get(token, 0.0))
    return weights


async def test_bge_m3_gives_all_three_kinds_in_one_batch(bge):
    model, reference, eager, sparse, tokens = bge
    assert model.info.embedding_kinds == set(EmbeddingKind) and model.info.late_interaction
    assert model.info.token_embedding_dimensions == 48
    ids = tokenized(model, TEXTS)
    vectors, weights, matrices = await asyncio.gather(*(embed(model, ids, kind=kind) for kind in EmbeddingKind))
    assert least_cosine(vectors, reference.encode(TEXTS, batch_size=1)) >= 0.99999
    for each, own in zip(ids, weights, strict=True):
        expected = lexical(eager, sparse, each)
        assert own.ids.tolist() == sorted(expected)
        np.testing.assert_allclose(own.weights, [expected[i] for i in sorted(expected)], atol=2e-5)
    expected = [
        torch.nn.functional.normalize(tokens(eager(input_ids=torch.tensor([each])).last_hidden_state[0, 1:]), dim=-1)
        for each in ids
    ]
    difference = 1 - least_cosine(matrices, expected)
    assert difference <= 1e-5
    record(
        "BertModel", "packed", "BGE-M3's token vectors", "FlagEmbedding's formula in float64, 1 - cosine", difference
    )


def test_heads_of_another_shape_are_refused_by_file(tmp_path):
    body = body_folder(tmp_path, BERT)
    torch.save({"weight": torch.zeros(1, 63), "bias": torch.zeros(1)}, body / "sparse_linear.pt")
    with pytest.raises(ModelLoadError, match=r"sparse_linear\.pt.*63.*BertModel gives 64"):
        serve(body, self_check=False)
    torch.save({"weight": torch.zeros(2, 64), "bias": torch.zeros(2)}, body / "sparse_linear.pt")
    with pytest.raises(ModelLoadError, match=r"sparse_linear\.pt"):
        serve(body, self_check=False)
    (body / "sparse_linear.pt").write_bytes(b"not a pickle")
    with pytest.raises(ModelLoadError, match=r"sparse_linear\.pt: cannot be read"):
        serve(body, self_check=False)
