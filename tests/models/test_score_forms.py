"""With the option ``deterministic``, all forms of Score give the same bits, on both kinds of decoder."""

import asyncio
import random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from pyruntime.model.loader import load_model
from pyruntime.v1 import score_pb2
from tests.models.classifying import MARKED, ROBERTA, save
from tests.models.rank_folders import byte_level_tokenizer, channel_to, load, save_model

DELIMITER, LOWEST, VOCABULARY = 7, 20, 400
FACTORIES = {"labels": AutoModelForCausalLM, "head": AutoModelForSequenceClassification}


@pytest.fixture
def three_threads():
    """Not a power of two: then threads share out rows of any width in the middle of one."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def serve(folder, kind):
    tokenizer = byte_level_tokenizer(folder)
    fields = {"pad_token_id": tokenizer.pad_token_id, "hidden_act": "gelu_pytorch_tanh", "intermediate_size": 500}
    save_model(folder, FACTORIES[kind], "qwen3", len(tokenizer), **fields)
    return load(folder, deterministic=True, max_batch_tokens=2048, kv_cache_bytes=2**26, threads=3)


@pytest.mark.parametrize("kind", FACTORIES)
async def test_behind_one_query_packed_and_alone(tmp_path, kind, three_threads):
    model, generator = serve(tmp_path, kind), random.Random(5)

    def ids(count):
        return [generator.randrange(LOWEST, VOCABULARY) for _ in range(count)]

    labels = {} if kind == "head" else {"label_token_ids": [30, 31, 3]}

    async def scored(stub, query, items=(), **fields):
        inputs = [{"token_ids": {"ids": item}} for item in items]
        request = score_pb2.ScoreRequest(query={"token_ids": {"ids": query}}, items=inputs, **labels, **fields)
        return [list(result.scores) for result in (await stub.Score(request)).results]

    try:
        async with channel_to(model) as stub:
            for num_query in (1, 33, 130, 400):
                query, items = ids(num_query), [ids(generator.randrange(1, 60)) for _ in range(24)]
                packed = [*query, DELIMITER, *(token for item in items for token in (*item, DELIMITER))]
                company = scored(stub, ids(300), [ids(9) for _ in range(20)])
                shared, delimited, _ = await asyncio.gather(
                    scored(stub, query, items), scored(stub, packed, delimiter_token_id=DELIMITER), company
                )
                alone = [(await scored(stub, query, [item]))[0] for item in items]
                assert shared == delimited == alone
    finally:
        model.engine.close()


@pytest.mark.parametrize("name", ["bert", "modernbert", "roberta"])
def test_a_heads_logits_of_a_row_do_not_depend_on_the_others(tmp_path, name, three_threads):
    fields = ROBERTA if name == "roberta" else MARKED | {"classifier_pooling": "cls"}
    save(tmp_path, name, "token" if name == "modernbert" else "sequence", **(fields | {"hidden_size": 96}))
    classifier = load_model(tmp_path, "float32", "cpu").classifier
    rows = torch.randn((900, 96), generator=torch.Generator().manual_seed(2))
    whole = classifier.logits(rows)
    for start in range(0, 900, 90):
        for count in (1, 7, 60):
            assert torch.equal(classifier.logits(rows[start : start + count]), whole[start : start + count])
