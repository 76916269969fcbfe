"""Classification heads of small random models against transformers eager, one by one; in mixed and chunked batches."""

import random
from dataclasses import replace

import pytest
import torch

from pyruntime.errors import ModelLoadError
from pyruntime.model.classifier import Reads
from pyruntime.model.classifier_check import check_classifier
from pyruntime.model.classifier_settings import read_cross_encoder_settings
from pyruntime.model.loader import load_model
from pyruntime.model_info import describe
from pyruntime.scheduler.sequence import Sequence
from pyruntime.types import Capability, ClassifyRequest, Task
from tests.models.classifying import (
    GROUPED,
    MARKED,
    PLAIN,
    ROBERTA,
    VOCABULARY,
    classify,
    eager,
    pair_types,
    save,
    sequence_of,
    texts,
)
from tests.models.recorder import record

DISTILBERT = {"vocab_size": VOCABULARY, "dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 96}
# T5 does not scale its attention, and starts with large weights of its own.
T5 = {"scale": 1.0, "vocab_size": VOCABULARY, "d_model": 64, "d_kv": 16, "num_layers": 2, "num_heads": 4, "d_ff": 96}
RELATIVE = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "type_vocab_size": 0}
BOTH = {
    "bert": ("bert", PLAIN),
    "roberta": ("roberta", ROBERTA),
    "xlm-roberta": ("xlm-roberta", ROBERTA),
    "distilbert": ("distilbert", DISTILBERT | {"max_position_embeddings": 128}),
    "electra": ("electra", PLAIN | {"embedding_size": 48}),
    "albert": ("albert", PLAIN | {"embedding_size": 32}),
    "modernbert": ("modernbert", MARKED | {"local_attention": 32}),
    "eurobert": ("eurobert", GROUPED),
    "nomic-bert": ("nomic_bert", PLAIN),
    "mpnet": ("mpnet", ROBERTA),
    "deberta-v2": ("deberta-v2", PLAIN | RELATIVE),
    "llama": ("llama", GROUPED),
    "qwen2": ("qwen2", GROUPED),
    "qwen3": ("qwen3", GROUPED | {"head_dim": 16}),
    "mistral": ("mistral", GROUPED | {"sliding_window": 32, "head_dim": 16}),
    "gemma2": ("gemma2", GROUPED | {"sliding_window": 32, "head_dim": 16, "query_pre_attn_scalar": 16}),
    "gpt2": ("gpt2", {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 200}),
}
SEQUENCE_ALONE = {
    "camembert": ("camembert", ROBERTA),
    "gte": ("gte", PLAIN | {"type_vocab_size": 2}),
    "modernbert-mean": ("modernbert", MARKED | {"classifier_pooling": "mean"}),
    "eurobert-mean": ("eurobert", GROUPED | {"classifier_pooling": "mean"}),
    "eurobert-bos": ("eurobert", GROUPED | {"classifier_pooling": "bos"}),
    "gemma3": ("gemma3_text", GROUPED | {"sliding_window": 32, "head_dim": 16, "query_pre_attn_scalar": 16}),
    "opt": ("opt", PLAIN | {"ffn_dim": 96, "word_embed_proj_dim": 64}),
}
TOKEN_ALONE = {"t5": ("t5", T5)}
CASES = [
    *((name, "sequence") for name in BOTH | SEQUENCE_ALONE),
    *((name, "token") for name in BOTH | TOKEN_ALONE),
]
# Of the largest logit. In bfloat16 the whole body rounds, two ways of summing apart.
ALLOWED = {"float32": 1e-5, "bfloat16": 0.03}
REFERENCE = "transformers eager in float32, difference / largest logit"


@pytest.mark.parametrize(("name", "head"), CASES, ids=["-".join(case) for case in CASES])
def test_logits_equal_eager(tmp_path, name, head):
    """Lengths from 1 to the limit, shuffled, in steps of few tokens, with and without token types."""
    model_type, fields = (BOTH | SEQUENCE_ALONE | TOKEN_ALONE)[name]
    save(tmp_path, model_type, head, **fields)
    reference = eager(tmp_path, head)
    for dtype, allowed in ALLOWED.items():
        loaded = load_model(tmp_path, dtype, "cpu")
        inputs = texts([1, 2, 3, 17, 40, 64, min(loaded.max_positions, 200)])
        random.Random(1).shuffle(inputs)
        types = [
            pair_types(ids) if loaded.takes_token_types and place % 2 else None for place, ids in enumerate(inputs)
        ]
        sequences = [
            sequence_of(ids, place, each, reuses_prefix=head == "sequence", raw=True)
            for place, (ids, each) in enumerate(zip(inputs, types, strict=True))
        ]
        own = classify(loaded, tmp_path, sequences)
        expected = [logits_of(reference, ids, each) for ids, each in zip(inputs, types, strict=True)]
        assert loaded.classifier.classifies_tokens is (head == "token")
        difference = largest_difference(own, expected)
        assert difference <= allowed, dtype
        path = loaded.execution_path.value
        record(loaded.architecture, path, f"{head} classifier", REFERENCE, difference, dtype)


def logits_of(model, ids, types=None):
    inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones((1, len(ids)), dtype=torch.int64)}
    if types is not None:
        inputs["token_type_ids"] = torch.tensor([types])
    return model(**inputs).logits[0]


def largest_difference(own, expected):
    for a, b in zip(own, expected, strict=True):
        assert a.shape == tuple(b.shape)
    scale = max(b.abs().max().item() for b in expected)
    pairs = zip(own, expected, strict=True)
    return max((torch.from_numpy(a) - b).abs().max().item() for a, b in pairs) / scale


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    save(folder, "qwen3", "sequence", **GROUPED, head_dim=16)
    return folder, load_model(folder, "float32", "cpu"), eager(folder, "sequence")


def test_items_behind_a_shared_prefix(qwen):
    folder, loaded, reference = qwen
    prefix, *items = texts([70, 1, 16, 40, 100], seed=3)
    parent = Sequence(Task.CLASSIFY, list(prefix), ClassifyRequest(items, raw=True), -1, is_prefix=True)
    children = [sequence_of(prefix + item, place, parent=parent, raw=True) for place, item in enumerate(items)]
    own = classify(loaded, folder, [parent, *children])
    assert largest_difference(own, [logits_of(reference, prefix + item) for item in items]) <= 1e-5


def test_delimited_items_in_one_causal_sequence(qwen):
    """Each item sees those before it: the packed form as it is, beside other texts."""
    folder, loaded, reference = qwen
    query, first, second, other = texts([60, 50, 9, 30], seed=4)
    packed = [*query, 4, *first, 4, *second, 4]
    sequences = [sequence_of(other, 0, raw=True), sequence_of(packed, 1, raw=True, delimiter_token_id=4)]
    alone, items = classify(loaded, folder, sequences, step_tokens=32)
    expected = [logits_of(reference, packed[:end]) for end in (111, 121)]
    assert largest_difference([alone, *items], [logits_of(reference, other), *expected]) <= 1e-5


def test_a_text_that_ends_in_padding_is_read_where_transformers_reads_it(qwen):
    folder, loaded, reference = qwen
    (ids,) = texts([20], seed=5)
    inputs = [[*ids, 0, 0], [0, 0, 0], [*ids, 0, *ids]]
    own = classify(loaded, folder, [sequence_of(each, place, raw=True) for place, each in enumerate(inputs)])
    assert largest_difference(own, [logits_of(reference, each) for each in inputs]) <= 1e-5


@pytest.mark.parametrize("head", ["sequence", "token"])
def test_deterministic_scores_do_not_depend_on_the_batch(tmp_path, head):
    save(tmp_path, "bert", head, **PLAIN)
    loaded = load_model(tmp_path, "float32", "cpu", deterministic=True)
    inputs = texts([1 + 3 * place % 40 for place in range(40)])
    together = classify(loaded, tmp_path, [sequence_of(ids, place) for place, ids in enumerate(inputs)], 1000)
    for place in (0, 7, 39):
        (alone,) = classify(loaded, tmp_path, [sequence_of(inputs[place])])
        assert alone.tobytes() == together[place].tobytes()


@pytest.mark.parametrize(
    ("model_type", "head", "num_labels", "able", "tail"),
    [
        ("bert", "sequence", 1, {Capability.CLASSIFY}, None),
        ("bert", "token", 3, {Capability.CLASSIFY}, None),
        ("llama", "sequence", 2, {Capability.CLASSIFY, Capability.SCORE}, 0),
        ("llama", "token", 2, {Capability.CLASSIFY}, None),
    ],
)
def test_what_clients_are_told(tmp_path, model_type, head, num_labels, able, tail):
    labels = {place: f"label {place}" for place in range(num_labels)}
    save(tmp_path, model_type, head, num_labels, **GROUPED, id2label=labels)
    loaded = load_model(tmp_path, "float32", "cpu")
    info = describe("model", loaded, read_cross_encoder_settings(tmp_path), None)
    assert (info.capabilities, info.labels) == (able, tuple(labels.values()))
    assert (info.classifies_tokens, info.embedding_dimensions) == (head == "token", 0)
    assert (info.embedding_kinds, info.ignored_tail_id) == (frozenset(), tail)


def test_a_head_that_reads_another_row_is_refused(qwen):
    """The check must be able to fail, in either dtype."""
    _, loaded, reference = qwen
    inputs = texts([1, 17, 40])
    for model in (reference, reference.bfloat16()):
        check_classifier(loaded.classifier, model, inputs)
        for reads in (Reads.FIRST, Reads.MEAN, Reads.MEAN_OF_EACH, Reads.EACH):
            with pytest.raises(ModelLoadError, match=f"Qwen3ForSequenceClassification.* {reads.value} hidden row"):
                check_classifier(replace(loaded.classifier, reads=reads), model, inputs)
    reference.float()
