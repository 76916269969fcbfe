"""How long a text may be: tables, offsets, rotary scaling, and models that name no length."""

import json
from types import SimpleNamespace

import pytest
import torch

from pyruntime.errors import InvalidField
from pyruntime.model.limits import UNNAMED, max_positions
from pyruntime.model.sentence import SentenceSettings
from pyruntime.model_info import describe
from pyruntime.self_check import run_batched
from pyruntime.service.inputs import TokenLimit
from pyruntime.types import PoolingType
from pyruntime.v1 import common_pb2
from tests.models.architectures import ENCODERS, PADDED, T5, eager_body, eager_rows, factory_of, load, parts, save

# Limits by what each config says; RoBERTa's family spends two places of its table on padding.
LIMITS = {
    "bert": (ENCODERS["bert"], 128),
    "roberta": (ENCODERS["roberta"], 126),
    "modernbert": (ENCODERS["modernbert"], 256),
    "mpnet": (PADDED["mpnet"], 126),
    "deberta-v2": (PADDED["deberta-v2"], 128),
    "t5": (T5 | {"n_positions": 90}, 90),
}


@pytest.mark.parametrize("name", LIMITS)
def test_a_text_of_the_limit_is_right_and_one_more_token_is_refused(tmp_path, name):
    fields, limit = LIMITS[name]
    save(tmp_path, name, fields, factory_of(name))
    loaded = load(tmp_path)
    info = describe("m", loaded, SentenceSettings(PoolingType.MEAN, normalize=True), None)
    assert info.context_length == limit
    ids = [3 + place % 190 for place in range(limit)]
    (rows,) = run_batched(*parts(loaded), [ids])
    expected = eager_rows(eager_body(tmp_path, factory_of(name)), ids)
    assert torch.nn.functional.cosine_similarity(rows, expected, dim=-1).min() >= 0.99999
    bound = TokenLimit(info.context_length, common_pb2.TRUNCATION_NONE)
    assert bound.fit(SimpleNamespace(), ids, "inputs[0]") == ids
    with pytest.raises(InvalidField, match=f"at most {limit}"):
        bound.fit(SimpleNamespace(), [*ids, 3], "inputs[0]")


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        ({"rope_type": "default"}, 1000),
        ({"rope_type": "linear", "factor": 4.0}, 1000),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 250}, 1000),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1000}, 4000),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 250}, 1000),
        ({"rope_type": "yarn", "factor": 4.0}, 1000),
        ({"rope_type": "dynamic", "factor": 4.0}, 1000),
        ({"rope_type": "longrope", "original_max_position_embeddings": 300}, 300),
        ({"full": {"rope_type": "default"}, "sliding": {"rope_type": "dynamic", "factor": 2.0}}, 1000),
    ],
)
def test_rotary_scaling(tmp_path, rope, limit):
    config = SimpleNamespace(max_position_embeddings=1000, rope_parameters=rope)
    assert max_positions(config, tmp_path, 0) == limit


@pytest.mark.parametrize(("named", "limit"), [(384, 384), (1e30, UNNAMED), (None, UNNAMED), ("many", UNNAMED)])
def test_without_a_length_in_the_config_the_tokenizer_tells(tmp_path, named, limit):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": named}))
    assert max_positions(SimpleNamespace(max_position_embeddings=-1), tmp_path, 0) == limit


def test_without_any_length_there_is_a_bound(tmp_path):
    assert max_positions(SimpleNamespace(), tmp_path, 0) == UNNAMED
