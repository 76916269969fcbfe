"""Decoders that sentence-transformers saved as a CrossEncoder, over a real channel, against ``predict``."""

import json
import shutil

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder
from transformers import AutoModelForCausalLM

from pyruntime.errors import ModelLoadError
from pyruntime.rerank_folder import read_saved_cross_encoder
from pyruntime.tokenization import Tokenizer
from tests.models.rank_folders import (
    DOCUMENTS,
    QUERY,
    by_index,
    byte_level_tokenizer,
    channel_to,
    load,
    rerank,
    save_model,
)
from tests.models.recorder import record

DEFAULT = "find passages"
TURN = "<|im_start|>judge\n"
CHAT = (
    "{%- set ns = namespace(task='" + DEFAULT + "') -%}"
    "{%- for m in messages if m.role == 'system' -%}{%- set ns.task = m.content -%}{%- endfor -%}"
    "<|im_start|>Task: {{ ns.task }}\n"
    "{% for m in messages if m.role != 'system' -%}{{ m.role }}: {{ m.content }}\n{% endfor -%}<|im_end|>"
    "{%- if add_generation_prompt %}" + TURN + "{% endif %}"
)
SIGMOID = "activation.Sigmoid"
REFERENCE = "sentence-transformers CrossEncoder.predict, difference of a score"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A random Qwen3 as sentence-transformers writes it."""
    body, folder = (tmp_path_factory.mktemp(name) for name in ("body", "saved"))
    tokenizer = byte_level_tokenizer(body)
    save_model(body, AutoModelForCausalLM, "qwen3", len(tokenizer))
    (body / "chat_template.jinja").write_text(CHAT)
    CrossEncoder(str(body), device="cpu").save_pretrained(str(folder))
    return folder


def changed(saved, tmp_path, chat=CHAT, activation=SIGMOID, **config):
    """A copy of the folder; ``config``: of its Transformer module."""
    folder = shutil.copytree(saved, tmp_path / "judge")
    (folder / "chat_template.jinja").write_text(chat)
    for name, changes in (
        ("sentence_bert_config.json", config),
        ("config_sentence_transformers.json", {"activation_fn": f"torch.nn.modules.{activation}"}),
    ):
        file = folder / name
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


@pytest.mark.parametrize("activation", [SIGMOID, "linear.Identity"])
async def test_scores_are_those_of_predict(saved, tmp_path, activation):
    opens = activation == "linear.Identity"
    processing = {"chat_template": {"add_generation_prompt": opens}}
    folder = changed(saved, tmp_path, activation=activation, processing_kwargs=processing)
    reference = CrossEncoder(str(folder), device="cpu")
    pairs = [(QUERY, each) for each in DOCUMENTS]
    model = load(folder)
    try:
        assert model.rerank_template.instruction == DEFAULT
        assert "".join(model.rerank_template.after).endswith(TURN) == opens
        async with channel_to(model) as stub:
            scores = by_index(await stub.Rerank(rerank(*DOCUMENTS)))
            other = by_index(await stub.Rerank(rerank(*DOCUMENTS, instruction="find rivers")))
            raw = by_index(await stub.Rerank(rerank(*DOCUMENTS, raw_scores=True)))
    finally:
        model.engine.close()
    expected = reference.predict(pairs)
    np.testing.assert_allclose(scores, expected, atol=1e-4)
    np.testing.assert_allclose(other, reference.predict(pairs, prompt="find rivers"), atol=1e-4)
    np.testing.assert_allclose(raw, reference.predict(pairs, activation_fn=torch.nn.Identity()), atol=1e-4)
    difference = float(np.abs(np.subtract(scores, expected)).max())
    record(model.info.architecture, "packed", "rerank by the folder's own template", REFERENCE, difference)


@pytest.mark.parametrize(
    ("chat", "activation", "says"),
    [
        (CHAT.replace("m.content }}\n", "m.content | upper }}\n"), SIGMOID, "changes texts"),
        (
            CHAT.replace("m.role != 'system'", "m.role == 'query'"),
            "activation.Sigmoid",
            "does not write the query and then",
        ),
        ("{{ raise_exception('no pairs') }}", SIGMOID, "cannot be put together.*no pairs"),
        (CHAT, "activation.Tanh", "config_sentence_transformers.json: activation_fn .*Tanh is not served"),
    ],
)
def test_folders_that_cannot_be_followed_are_refused(saved, tmp_path, chat, activation, says):
    folder = changed(saved, tmp_path, chat, activation)
    with pytest.raises(ModelLoadError, match=says):
        read_saved_cross_encoder(folder, Tokenizer.from_pretrained(folder))
