"""Small random models of many architectures against transformers eager, one text at a time, in two dtypes."""

import random

import pytest
import torch

from pyruntime.errors import ModelLoadError
from pyruntime.self_check import run_batched, self_check
from tests.models.architectures import (
    DECODERS,
    ENCODERS,
    ONE_BY_ONE,
    PADDED,
    eager_body,
    eager_rows,
    factory_of,
    load,
    parts,
    save,
)
from tests.models.recorder import record

REFERENCE = "transformers eager in float32, each text alone: 1 - cosine"
LENGTHS = (1, 2, 3, 16, 17, 40, 41, 65)
# How far an answer may be off. Rows of a decoder are answers themselves; a text's mean is what encoders are asked for.
ALLOWED = {"float32": 1e-5, "bfloat16": 5e-4}
CASES = [
    *[(name, DECODERS[name], "packed", True) for name in DECODERS],
    *[(name, ENCODERS[name], "packed", False) for name in ENCODERS],
    *[(name, fields, "padded", False) for name, fields in (PADDED | ONE_BY_ONE).items()],
]
# transformers' own forward of these fails in bfloat16, so loading them so is refused.
FLOAT32_ALONE = ("deberta", "fnet")


def texts_of(loaded):
    """Shuffled texts of mixed lengths, the longest of the model's limit."""
    generator = random.Random(7)
    assert loaded.max_positions <= 256
    lengths = [*LENGTHS, loaded.max_positions]
    generator.shuffle(lengths)
    return [[generator.randrange(3, 190) for _ in range(length)] for length in lengths]


def difference(own, expected):
    return 1 - torch.nn.functional.cosine_similarity(own.double(), expected.double(), dim=-1).min().item()


def compare(loaded, references, dtype):
    """Largest difference of a hidden row and of a text's mean from ``references``, in one shuffled batch."""
    texts = [ids for ids, _ in references]
    rows = run_batched(*parts(loaded), texts)
    worst = {"hidden rows": 0.0, "MEAN": 0.0}
    for own, (_, expected) in zip(rows, references, strict=True):
        worst["hidden rows"] = max(worst["hidden rows"], difference(own, expected))
        worst["MEAN"] = max(worst["MEAN"], difference(own.double().mean(0), expected.double().mean(0)))
    for head, value in worst.items():
        record(loaded.architecture, loaded.execution_path.value, head, REFERENCE, value, dtype)
    return worst


def own_rounding(folder, factory, references):
    """Largest difference of a text's mean in transformers' own eager model in bfloat16."""
    body = eager_body(folder, factory, torch.bfloat16)
    return max(difference(eager_rows(body, ids).double().mean(0), rows.double().mean(0)) for ids, rows in references)


@pytest.mark.parametrize(
    ("name", "fields", "path", "is_decoder"),
    CASES,
    ids=[f"{c[0]}-{c[2]}-{'causal' if c[3] else 'two_sided'}" for c in CASES],
)
def test_batches_equal_eager_one_by_one(tmp_path, name, fields, path, is_decoder):
    factory = factory_of(name, is_decoder)
    save(tmp_path, name, fields, factory)
    body = eager_body(tmp_path, factory)
    loaded = load(tmp_path)
    assert loaded.execution_path.value == path and loaded.is_causal is is_decoder
    assert (loaded.output_head is not None) is is_decoder
    assert loaded.one_by_one is (name in ONE_BY_ONE)
    assert self_check(*parts(loaded)) >= 1 - ALLOWED["float32"]
    references = [(ids, eager_rows(body, ids)) for ids in texts_of(loaded)]
    assert max(compare(loaded, references, "float32").values()) <= ALLOWED["float32"]
    if name in FLOAT32_ALONE:
        with pytest.raises(ModelLoadError, match="transformers' own forward fails"):
            load(tmp_path, "bfloat16")
        return
    loaded = load(tmp_path, "bfloat16")
    worst = compare(loaded, references, "bfloat16")["MEAN"]
    # Random routers and convolutions lose more than real models do: then no more than transformers itself.
    assert worst <= ALLOWED["bfloat16"] or worst <= 1.5 * own_rounding(tmp_path, factory, references)
