"""Folders whose classifier cannot be served right: refused at load, with the reason and the file's name."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForMaskedLM

from pyruntime.errors import ModelLoadError
from pyruntime.model.classifier_settings import read_cross_encoder_settings
from pyruntime.model.loader import load_model
from tests.models.classifying import GROUPED, PLAIN, VOCABULARY, save

BERT = "BertForSequenceClassification"


def edit(folder, name="config.json", **changes):
    file = folder / name
    content = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(content | changes))


def named(count):
    return {str(place): f"label {place}" for place in range(count)}


@pytest.fixture
def folder(tmp_path):
    save(tmp_path, "bert", "sequence", **PLAIN)
    return tmp_path


def refused(folder, *reasons, loader=load_model):
    with pytest.raises(ModelLoadError) as error:
        loader(folder, "float32", "cpu") if loader is load_model else loader(folder)
    for reason in (str(folder), *reasons):
        assert reason in error.value.message


def test_fewer_labels_than_the_head_has_rows(folder):
    edit(folder, id2label=named(2), label2id={})
    refused(folder, "config.json", "classifier.weight is [3, 64] in the file and [2, 64]")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"id2label": {"0": "a", "2": "b", "3": "c"}}, "id2label must name 0..n-1, it names [0, 2, 3]"),
        ({"num_labels": 3, "id2label": named(2)}, "num_labels is 3, but id2label names 2 labels"),
        ({"architectures": ["RobertaForSequenceClassification"]}, "its model_type loads as BertForSequence"),
        ({"sentence_transformers": {"activation_fn": "my_package.Scale"}}, "my_package.Scale is not served"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.Bilinear"}}, "torch.nn.Bilinear is not served"),
        ({"sbert_ce_default_activation_function": "torch.hub.load"}, "torch.hub.load is not served"),
        ({"architectures": ["MyBertForSequenceClassification"], "auto_map": {}}, "remote code is never run"),
        ({"architectures": ["BertForMultipleChoice"]}, "BertForMultipleChoice is not served"),
    ],
)
def test_a_config_that_cannot_be_followed(folder, changes, reason):
    edit(folder, **changes)
    refused(folder, "config.json" if "Choice" not in reason else "served: [", reason)


def test_weights_without_a_head(folder):
    AutoModelForMaskedLM.from_pretrained(folder).save_pretrained(folder)
    edit(folder, architectures=[BERT])
    refused(folder, "missing ['bert.pooler.dense.bias', 'bert.pooler.dense.weight', 'classifier.bias'")


@pytest.mark.parametrize("architecture", [BERT, "BertModel"])
def test_weights_of_more_layers_than_the_config_has(folder, architecture):
    edit(folder, num_hidden_layers=1, architectures=[architecture])
    refused(folder, "do not fit config.json", "unused ['bert.encoder.layer.1.attention.output.LayerNorm.bias'")


def test_weights_of_biases_that_the_config_has_not(tmp_path):
    save(tmp_path, "llama", "sequence", **GROUPED, attention_bias=True)
    edit(tmp_path, attention_bias=False)
    refused(tmp_path, "unused ['model.layers.0.self_attn.k_proj.bias'")


def test_heads_that_are_not_read_and_old_buffers_are_no_contradiction(folder):
    edit(folder, architectures=["BertModel"])
    weights = load_file(folder / "model.safetensors")
    assert "classifier.weight" in weights
    weights["bert.encoder.layer.0.attention.self.distance"] = torch.zeros(3)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert load_model(folder, "float32", "cpu").classifier is None


def test_a_language_model_without_its_output_matrix(tmp_path):
    save(tmp_path, "llama", "sequence", **GROUPED, tie_word_embeddings=False)
    edit(tmp_path, architectures=["LlamaForCausalLM"])
    refused(tmp_path, "missing ['lm_head.weight']")


def test_modules_that_need_a_masked_language_model(folder):
    (folder / "modules.json").write_text(
        json.dumps([{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.MLMTransformer"}])
    )
    refused(folder, "modules.json", f"{BERT} has not")
    AutoModel.from_pretrained(folder).save_pretrained(folder)
    edit(folder, architectures=["BertForMaskedLM"])
    refused(folder, "missing ['cls.predictions.")


def test_an_adapter(tmp_path):
    edit(tmp_path, "adapter_config.json", peft_type="LORA", base_model_name_or_path="some/model")
    refused(tmp_path, "adapter_config.json", "PEFT adapter")


def test_an_unknown_way_of_pooling(tmp_path):
    save(tmp_path, "eurobert", "sequence", **GROUPED, classifier_pooling="late")
    edit(tmp_path, classifier_pooling="max")
    refused(tmp_path, "config.json", "classifier_pooling 'max' is not served")


def test_a_head_that_is_not_a_function_of_hidden_rows(tmp_path):
    save(tmp_path, "longformer", "sequence", **PLAIN, attention_window=16)
    refused(tmp_path, "LongformerForSequenceClassification is not served")


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("modules.json", [{"path": "", "type": "my_package.Transformer"}], "my_package.Transformer"),
        (
            "modules.json",
            [{"path": "", "type": "sentence_transformers.models.Transformer"}] * 2,
            "with one Transformer",
        ),
        ("config_sentence_transformers.json", {"prompts": {"q": "Q: "}, "default_prompt_name": "q"}, "name 'q' is not"),
        ("sentence_bert_config.json", {"do_lower_case": True}, "['do_lower_case'] are not served"),
        ("sentence_bert_config.json", {"transformer_task": "text-generation"}, "'sequence-classification'"),
        ("sentence_bert_config.json", {"max_seq_length": -1}, "max_seq_length"),
    ],
)
def test_cross_encoder_files_that_say_more(folder, name, content, reason):
    (folder / name).write_text(json.dumps(content))
    refused(folder, name, reason, loader=read_cross_encoder_settings)


def test_a_folder_without_those_files_has_no_limit_of_its_own(folder):
    assert read_cross_encoder_settings(folder).max_tokens is None
    edit(folder, "sentence_bert_config.json", max_seq_length=VOCABULARY)
    assert read_cross_encoder_settings(folder).max_tokens == VOCABULARY
