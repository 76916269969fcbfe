"""Activations and pairs of cross-encoders, against ``CrossEncoder.predict`` of sentence-transformers."""

import json
import shutil

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder
from transformers import BertTokenizerFast

from pyruntime.model.classifier_settings import read_cross_encoder_settings
from pyruntime.model.loader import load_model
from tests.models.classifying import PLAIN, VOCABULARY, classify, save, sequence_of
from tests.models.recorder import record

WORDS = [f"w{place}" for place in range(VOCABULARY - 5)]
PAIRS = [
    (" ".join(WORDS[3 * place : 3 * place + 1 + place % 5]), " ".join(WORDS[place : place + 1 + 2 * place]))
    for place in range(12)
]
NEWER, OLDER = "torch.nn.modules.activation.Tanh", "torch.nn.modules.linear.Identity"
REFERENCE = "sentence-transformers CrossEncoder.predict, difference of a score"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """base(labels) → a folder with a BERT of that many labels and its tokenizer."""
    made = {}

    def get(num_labels):
        if num_labels not in made:
            folder = made[num_labels] = tmp_path_factory.mktemp(f"labels{num_labels}")
            save(folder, "bert", "sequence", num_labels, **PLAIN)
            (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
            BertTokenizerFast(vocab=str(folder / "vocab.txt"), model_max_length=96).save_pretrained(folder)
        return made[num_labels]

    return get


def with_config(base, folder, **changes):
    """A copy of the base folder whose config says more."""
    shutil.copytree(base, folder, dirs_exist_ok=True)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


def scores_of(folder, dtype="float32", raw=False):
    """Scores of all pairs, encoded by the folder's own tokenizer."""
    loaded = load_model(folder, dtype, "cpu")
    encode = BertTokenizerFast.from_pretrained(folder)
    sequences = []
    for place, pair in enumerate(PAIRS):
        encoded = encode(*pair)
        sequences.append(sequence_of(encoded["input_ids"], place, encoded["token_type_ids"], raw=raw))
    return np.stack(classify(loaded, folder, sequences))


def compare(own, expected):
    difference = float(np.abs(own - expected).max())
    assert difference <= 1e-5
    record("BertForSequenceClassification", "packed", "cross-encoder scores", REFERENCE, difference)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sentence_transformers": {"activation_fn": NEWER, "version": "5.0.0"}},
        {"sbert_ce_default_activation_function": OLDER},
        {"sentence_transformers": {"activation_fn": NEWER}, "sbert_ce_default_activation_function": OLDER},
    ],
    ids=["sigmoid by default", "newer key", "older key", "newer before older"],
)
def test_one_label(base, tmp_path, changes):
    folder = with_config(base(1), tmp_path, **changes)
    compare(scores_of(folder)[:, 0], CrossEncoder(str(folder)).predict(PAIRS))


@pytest.mark.parametrize("activation", ["Sigmoid", "Identity", "Softmax", "LogSigmoid", "Softplus", "ReLU"])
def test_a_folder_that_sentence_transformers_saved(base, tmp_path, activation):
    model = CrossEncoder(str(base(3)), activation_fn=getattr(torch.nn, activation)())
    model.save_pretrained(str(tmp_path))
    expected = CrossEncoder(str(tmp_path)).predict(PAIRS)
    compare(scores_of(tmp_path), expected)
    assert read_cross_encoder_settings(tmp_path).max_tokens == 96


def test_several_labels_are_a_softmax_by_default(base):
    compare(scores_of(base(3)), CrossEncoder(str(base(3))).predict(PAIRS, apply_softmax=True))


@pytest.mark.parametrize(
    ("problem_type", "activation"),
    [("regression", torch.nn.Identity()), ("multi_label_classification", torch.nn.Sigmoid())],
)
@pytest.mark.parametrize("num_labels", [1, 3])
def test_problem_type(base, tmp_path, problem_type, activation, num_labels):
    folder = with_config(base(num_labels), tmp_path, problem_type=problem_type)
    expected = CrossEncoder(str(folder)).predict(PAIRS, activation_fn=activation)
    compare(scores_of(folder), expected.reshape(len(PAIRS), -1))


def test_raw_scores_are_logits(base):
    expected = CrossEncoder(str(base(1))).predict(PAIRS, activation_fn=torch.nn.Identity())
    compare(scores_of(base(1), raw=True)[:, 0], expected)


def test_scores_near_one_keep_their_order_in_bfloat16(base, tmp_path):
    """bfloat16 has steps of 1/256 below 1, where all of these would be equal."""
    folder = with_config(base(1), tmp_path)
    model = CrossEncoder(str(folder)).model
    with torch.no_grad():
        model.classifier.weight.mul_(3.0)
        model.classifier.bias.fill_(7.0)
    model.save_pretrained(folder)
    logits, scores = scores_of(folder, "bfloat16", raw=True)[:, 0], scores_of(folder, "bfloat16")[:, 0]
    assert scores.dtype == np.float32
    assert scores.min() > 1 - 1 / 256
    assert np.array_equal(np.argsort(scores), np.argsort(logits))
    assert len(set(scores)) == len(PAIRS) and len(set(torch.from_numpy(scores).bfloat16().tolist())) == 1
