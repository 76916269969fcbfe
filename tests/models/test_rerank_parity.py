"""Rerank and Classify of small encoders, over a real channel, against sentence-transformers and transformers."""

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, BertTokenizerFast

from pyruntime.rerank_template import RerankWay, rerank_way
from pyruntime.types import Capability
from pyruntime.v1 import common_pb2, score_pb2
from tests.models.rank_folders import DOCUMENTS, QUERY, by_index, channel_to, eager, load, logits_of, rerank, save_model
from tests.models.recorder import record
from tests.models.texts import WORDS, text

REFERENCE = "sentence-transformers CrossEncoder.predict, difference of a score"


def bert(folder, num_labels, factory=AutoModelForSequenceClassification):
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *dict.fromkeys(WORDS), "?", "!", ":", "two", "lines"]
    fields = {"num_labels": num_labels, "max_position_embeddings": 128}
    save_model(folder, factory, "bert", len(vocabulary), **fields)
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    BertTokenizerFast(vocab=str(folder / "vocab.txt"), model_max_length=128).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def cross(tmp_path_factory):
    folder = bert(tmp_path_factory.mktemp("cross"), 1)
    model = load(folder)
    yield folder, model
    model.engine.close()


async def test_order_and_scores_are_cross_encoders(cross):
    folder, model = cross
    assert rerank_way(model.info, model.rerank_template) is RerankWay.PAIRS
    assert model.info.capabilities == {Capability.CLASSIFY, Capability.RERANK}
    reference = CrossEncoder(str(folder))
    expected = reference.predict([(QUERY, each) for each in DOCUMENTS])
    raw = reference.predict([(QUERY, each) for each in DOCUMENTS], activation_fn=torch.nn.Identity())
    async with channel_to(model) as stub:
        answer = await stub.Rerank(rerank(*DOCUMENTS))
        np.testing.assert_allclose(by_index(answer), expected, atol=1e-5)
        difference = float(np.abs(by_index(answer) - expected).max())
        record(model.info.architecture, "packed", "rerank by pairs", REFERENCE, difference)
        order = [each["corpus_id"] for each in reference.rank(QUERY, DOCUMENTS)]
        assert [each.index for each in answer.results] == order
        np.testing.assert_allclose(by_index(await stub.Rerank(rerank(*DOCUMENTS, raw_scores=True))), raw, atol=1e-4)


async def test_a_thousand_documents_in_one_call(cross):
    folder, model = cross
    documents = [text(seed % 400, 1 + seed % 23) for seed in range(1000)]
    documents[17], documents[500] = "", " \n"
    async with channel_to(model) as stub:
        answer = await stub.Rerank(rerank(*documents, top_n=2000, return_documents=True))
    assert [each.index for each in answer.errors] == [17, 500]
    assert sorted(each.index for each in answer.results) == [i for i in range(1000) if i not in (17, 500)]
    assert all(each.document == documents[each.index] for each in answer.results)
    pairs = [(-each.score, each.index) for each in answer.results]
    assert pairs == sorted(pairs)
    some = [each for each in answer.results if each.index % 97 == 0]
    expected = CrossEncoder(str(folder)).predict([(QUERY, documents[each.index]) for each in some])
    np.testing.assert_allclose([each.score for each in some], expected, atol=1e-5)


async def test_a_long_document_is_cut_as_transformers_cuts_the_second_text(cross):
    folder, model = cross
    tokenizer, long = BertTokenizerFast.from_pretrained(folder), text(3, 300)
    ids = tokenizer(QUERY, long, truncation="only_second", max_length=128)
    reference = eager(folder, AutoModelForSequenceClassification)
    with torch.inference_mode():
        expected = reference(**{name: torch.tensor([value]) for name, value in ids.items()}).logits.item()
    async with channel_to(model) as stub:
        cut = await stub.Rerank(rerank(long, truncation=common_pb2.TRUNCATION_RIGHT, raw_scores=True))
        assert cut.results[0].score == pytest.approx(expected, abs=1e-4)
        with pytest.raises(Exception, match="unless truncation is set"):
            await stub.Rerank(rerank(long))


async def test_classes_of_texts_and_pairs(tmp_path):
    folder = bert(tmp_path, 3)
    model, reference = load(folder), CrossEncoder(str(folder))
    pairs = [(QUERY, each) for each in DOCUMENTS[:6]]
    both = [{"first": {"text": first}, "second": {"text": second}} for first, second in pairs]
    expected = reference.predict(pairs, apply_softmax=True)
    try:
        assert Capability.RERANK not in model.info.capabilities
        async with channel_to(model) as stub:
            answer = await stub.Classify(score_pb2.ClassifyRequest(pairs=both))
            texts = [{"text": each} for each in DOCUMENTS[:6]]
            alone = await stub.Classify(score_pb2.ClassifyRequest(inputs=texts, raw_scores=True))
    finally:
        model.engine.close()
    for result, row in zip(answer.results, expected, strict=True):
        assert [each.label for each in result.scores] == [model.info.labels[i] for i in np.argsort(-row)]
        np.testing.assert_allclose([each.score for each in result.scores], np.sort(row)[::-1], atol=1e-5)
    own, tokenizer = eager(folder, AutoModelForSequenceClassification), BertTokenizerFast.from_pretrained(folder)
    for result, document in zip(alone.results, DOCUMENTS, strict=False):
        logits = logits_of(own, tokenizer(document)["input_ids"]).numpy()
        np.testing.assert_allclose([each.score for each in result.scores], np.sort(logits)[::-1], atol=1e-4)


async def test_classes_of_tokens(tmp_path):
    folder = bert(tmp_path, 4, AutoModelForTokenClassification)
    model, reference = load(folder), eager(folder, AutoModelForTokenClassification)
    try:
        async with channel_to(model) as stub:
            inputs = [{"text": each} for each in DOCUMENTS[:4]]
            answer = await stub.Classify(score_pb2.ClassifyRequest(inputs=inputs, raw_scores=True))
    finally:
        model.engine.close()
    for document, result in zip(DOCUMENTS, answer.results, strict=False):
        ids = BertTokenizerFast.from_pretrained(folder)(document)["input_ids"]
        assert [each.token_id for each in result.tokens] == ids
        own = [{each.label: each.score for each in token.scores} for token in result.tokens]
        rows = [[scores[label] for label in model.info.labels] for scores in own]
        np.testing.assert_allclose(rows, logits_of(reference, ids).numpy(), atol=1e-4)
