"""Folders that cannot be served as they ask to be: each is refused by the file's name and the reason."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from pyruntime.errors import ModelLoadError
from pyruntime.model.sentence import needs_masked_lm, read_sentence_settings
from pyruntime.types import PoolingType, QueryExpansion
from tests.models.sentence_folders import body_folder, save_tokenizer, serve

PACKAGE = "sentence_transformers.models."
MODULES = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Dense", "Dense"), ("3_Normalize", "Normalize")]


def write(file, content):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content if isinstance(content, str) else json.dumps(content))


def modules(*entries):
    return [
        {"idx": i, "name": str(i), "path": path, "type": kind if "." in kind else PACKAGE + kind}
        for i, (path, kind) in enumerate(entries)
    ]


@pytest.fixture
def folder(tmp_path):
    """The older layout, whole and right: mean, one Dense, normalised."""
    write(tmp_path / "modules.json", modules(*MODULES))
    flags = {"word_embedding_dimension": 64, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
    write(tmp_path / "1_Pooling/config.json", flags)
    activation = "torch.nn.modules.activation.Tanh"
    dense = {"in_features": 64, "out_features": 16, "bias": True, "activation_function": activation}
    write(tmp_path / "2_Dense/config.json", dense)
    weights = {"linear.weight": torch.ones(16, 64), "linear.bias": torch.zeros(16)}
    torch.save(weights, tmp_path / "2_Dense/pytorch_model.bin")
    write(tmp_path / "3_Normalize/config.json", {})
    write(tmp_path / "sentence_bert_config.json", {"max_seq_length": 48, "do_lower_case": False})
    write(tmp_path / "config_sentence_transformers.json", {"prompts": {"query": "q: "}, "default_prompt_name": "query"})
    return tmp_path


def test_the_whole_folder_is_read(folder):
    found = read_sentence_settings(folder, is_causal=False)
    assert (found.pooling, found.normalize, found.max_tokens, found.dimensions) == (PoolingType.MEAN, True, 48, 16)
    assert (found.prompts, found.default_prompt_name, found.similarity) == ({"query": "q: "}, "query", "cosine")
    assert found.projection.steps(torch.ones(2, 64)).tolist() == torch.ones(2, 16).tolist()
    assert not needs_masked_lm(folder)


def change(folder, file, **fields):
    """The file with other fields; None leaves the field out."""
    path = folder / file
    content = json.loads(path.read_text()) | fields
    write(path, {key: value for key, value in content.items() if value is not None})


POOLING, DENSE, TEXTS = "1_Pooling/config.json", "2_Dense/config.json", "config_sentence_transformers.json"
TRANSFORMER, NORMALIZE = "sentence_bert_config.json", "3_Normalize/config.json"
CHANGED = {
    "maximum": (
        POOLING,
        {"pooling_mode_mean_tokens": False, "pooling_mode_max_tokens": True},
        "max_tokens.*not served",
    ),
    "two of them": (POOLING, {"pooling_mode_cls_token": True}, "pooling.*cls_token.*mean_tokens.*not served"),
    "none of them": (POOLING, {"pooling_mode_mean_tokens": False}, r"pooling \[\] is not served"),
    "weighted": (POOLING, {"pooling_mode": "weightedmean"}, "pooling_mode 'weightedmean' is not served"),
    "concatenated": (POOLING, {"pooling_mode": ["cls", "mean"]}, r"pooling_mode \['cls', 'mean'\] is not served"),
    "no width": (POOLING, {"word_embedding_dimension": "64"}, "word_embedding_dimension is '64'"),
    "other width": (POOLING, {"word_embedding_dimension": 32}, "takes vectors of 64, but .*1_Pooling.*gives 32"),
    "activation": (DENSE, {"activation_function": "torch.nn.modules.activation.PReLU"}, "PReLU' is not served"),
    "own activation": (DENSE, {"activation_function": "os.system"}, "'os.system' is not served"),
    "shape": (DENSE, {"out_features": 17}, r"linear\.weight \[17, 64\]"),
    "no bias": (DENSE, {"bias": False}, r"holds linear\.bias \[16\]"),
    "features": (DENSE, {"in_features": -1}, "in_features is -1"),
    "level": (DENSE, {"module_input_name": "token_embeddings"}, "Dense reads token_embeddings"),
    "last level": (NORMALIZE, {"module_input_name": "token_embeddings"}, "Normalize reads token_embeddings"),
    "prompts": (TEXTS, {"prompts": {"query": 5}}, "prompts must be texts"),
    "default prompt": (TEXTS, {"default_prompt_name": "passage"}, "'passage' is none of the prompts"),
    "too wide": (TEXTS, {"truncate_dim": 17}, "truncate_dim 17 of vectors of 16"),
    "length": (TRANSFORMER, {"max_seq_length": 0}, "max_seq_length is 0"),
    "lower case": (TRANSFORMER, {"do_lower_case": True}, "do_lower_case is not served"),
    "task": (TRANSFORMER, {"transformer_task": "retrieval"}, "transformer_task 'retrieval' is not served"),
    "images": (TRANSFORMER, {"modality_config": {"image": {}}}, "modality_config takes text as None"),
    "options": (TRANSFORMER, {"config_args": {"is_causal": False}}, r"config_args \['is_causal'\] are not served"),
}


def test_lower_case_is_served_where_the_tokenizer_does_it_itself(folder):
    change(folder, TRANSFORMER, do_lower_case=True)
    save_tokenizer(folder)
    assert read_sentence_settings(folder, is_causal=False).max_tokens == 48


@pytest.mark.parametrize("name", CHANGED)
def test_a_changed_file_is_refused_by_name(folder, name):
    file, fields, reason = CHANGED[name]
    change(folder, file, **fields)
    with pytest.raises(ModelLoadError, match=f"(?s){reason}") as caught:
        read_sentence_settings(folder, is_causal=False)
    assert file.split("/")[0] in str(caught.value)


LISTS = {
    "own code": (
        modules(("", "custom_model.Transformer")),
        "custom_model.Transformer is code that comes with the model",
    ),
    "a router": (modules(("", "Transformer"), ("1_Router", "Router")), r"\['Router'\] are not served"),
    "asymmetric": (modules(("", "Asym")), r"\['Asym'\] are not served"),
    "images": (modules(("0_CLIPModel", "CLIPModel")), r"\['CLIPModel'\] are not served"),
    "no transformer": (modules(("0_StaticEmbedding", "StaticEmbedding")), r"\['StaticEmbedding'\] are not served"),
    "words": (modules(("0_WordEmbeddings", "WordEmbeddings"), ("1_CNN", "CNN")), r"\['WordEmbeddings', 'CNN'\]"),
    "pooling first": (modules(*MODULES[1:]), "the first module is not Transformer"),
    "dense before": (modules(MODULES[0], MODULES[2], MODULES[1]), "in this order are not served"),
    "no pooling": (modules(MODULES[0], MODULES[2]), "neither Pooling nor MultiVectorMask"),
    "elsewhere": (modules(("0_Transformer", "Transformer"), MODULES[1]), "0_Transformer; served: beside modules.json"),
    "splade and more": (modules(MODULES[0], ("1_SpladePooling", "SpladePooling"), MODULES[3]), "in this order"),
    "splade of rows": (modules(MODULES[0], ("1_SpladePooling", "SpladePooling")), "needs transformer_task 'fill-mask'"),
    "token clusters": (modules(MODULES[0], ("1_Pool", "HierarchicalTokenPooling")), "HierarchicalTokenPooling"),
    "nothing": ([], "the first module is not Transformer"),
    "no list": ({"a": 1}, "expected a list of modules"),
    "null": (None, "expected a list of modules"),
    "no entries": ([None], "None names no type and path"),
    "no JSON": ("{", "modules.json"),
}


@pytest.mark.parametrize("name", LISTS)
def test_a_list_of_modules_that_is_not_served_is_refused_by_name(folder, name):
    content, reason = LISTS[name]
    write(folder / "modules.json", content)
    with pytest.raises(ModelLoadError, match=reason) as caught:
        read_sentence_settings(folder, is_causal=False)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("file", [POOLING, DENSE, TEXTS, TRANSFORMER, NORMALIZE])
@pytest.mark.parametrize("content", [None, 5, ["a"]])
def test_a_file_of_another_form_is_refused_by_name(folder, file, content):
    write(folder / file, content)
    with pytest.raises(ModelLoadError, match=f"{file}: expected a JSON object"):
        read_sentence_settings(folder, is_causal=False)


FORMS = {
    POOLING: {"include_prompt": "false", "pooling_mode": 5},
    DENSE: {"bias": "no", "use_residual": 1, "activation_function": ["Tanh"]},
    TEXTS: {"default_prompt_name": ["query"], "prompts": ["query"], "truncate_dim": "8"},
    TRANSFORMER: {"max_seq_length": "48", "model_args": 5, "config_kwargs": ["a"]},
}


@pytest.mark.parametrize(("file", "key"), [(file, key) for file, fields in FORMS.items() for key in fields])
def test_a_value_of_another_form_is_refused_by_file_and_key(folder, file, key):
    change(folder, file, **{key: FORMS[file][key]})
    with pytest.raises(ModelLoadError, match=f"{file}: .*{key}|{file}: {key}"):
        read_sentence_settings(folder, is_causal=False)


def test_an_activation_that_is_null_is_not_taken_for_the_default(folder):
    write(folder / DENSE, json.loads((folder / DENSE).read_text()) | {"activation_function": None})
    with pytest.raises(ModelLoadError, match=f"{DENSE}: activation_function None is not served"):
        read_sentence_settings(folder, is_causal=False)


def test_missing_and_damaged_weights_are_refused_by_file(folder):
    weights = folder / "2_Dense/pytorch_model.bin"
    weights.write_bytes(weights.read_bytes()[:200])
    with pytest.raises(ModelLoadError, match=r"2_Dense.pytorch_model\.bin: cannot be read"):
        read_sentence_settings(folder, is_causal=False)
    weights.unlink()
    with pytest.raises(ModelLoadError, match=r"2_Dense: neither model\.safetensors nor pytorch_model\.bin"):
        read_sentence_settings(folder, is_causal=False)
    save_file(
        {"linear.weight": torch.full((16, 64), torch.nan), "linear.bias": torch.zeros(16)},
        folder / "2_Dense/model.safetensors",
    )
    with pytest.raises(ModelLoadError, match=r"model\.safetensors: linear\.weight holds values that are not finite"):
        read_sentence_settings(folder, is_causal=False)
    (folder / DENSE).unlink()
    with pytest.raises(ModelLoadError, match="in_features is None"):
        read_sentence_settings(folder, is_causal=False)


class Harmful:
    def __reduce__(self):
        return (print, ("code ran",))


def test_a_pickle_that_holds_code_is_not_run(folder, capsys):
    torch.save({"linear.weight": Harmful()}, folder / "2_Dense/pytorch_model.bin")
    with pytest.raises(ModelLoadError, match=r"pytorch_model\.bin: cannot be read"):
        read_sentence_settings(folder, is_causal=False)
    assert "code ran" not in capsys.readouterr().out


SPLADES = {
    "sum": ({"pooling_strategy": "sum"}, "pooling_strategy 'sum' is not served"),
    "softplus": ({"activation_function": "softplus"}, "activation_function 'softplus' is not served"),
}


@pytest.mark.parametrize("name", SPLADES)
def test_other_splades_are_refused(folder, name):
    config, reason = SPLADES[name]
    write(folder / "modules.json", modules(MODULES[0], ("1_SpladePooling", "SpladePooling")))
    write(folder / "1_SpladePooling/config.json", config)
    change(folder, TRANSFORMER, transformer_task="fill-mask")
    assert needs_masked_lm(folder)
    with pytest.raises(ModelLoadError, match=f"1_SpladePooling.*{reason}"):
        read_sentence_settings(folder, is_causal=False)
    write(folder / "1_SpladePooling/config.json", {})
    with pytest.raises(ModelLoadError, match="sparse embeddings of a causal model"):
        read_sentence_settings(folder, is_causal=True)


LATE = {
    "allowed tokens": ({"keep_only_token_ids": [5]}, {}, "keep_only_token_ids is not served"),
    "tasks": ({"skiplist_words": ["."], "skiplist_tasks": ["query"]}, {}, r"skiplist_tasks \['query'\] is not served"),
    "expansion": (
        {},
        {"query_expansion": {"strategy": "double", "length": 3}},
        "query_expansion .*double.* not served",
    ),
    "no length": ({}, {"query_expansion": {"strategy": "min"}}, "length is None"),
    "token": ({}, {"query_expansion": {"strategy": "min", "length": 3, "token": 5}}, "token is 5; expected a text"),
    "words": ({"skiplist_words": 5}, {}, r"3_MultiVectorMask.config\.json: skiplist_words is 5"),
    "no tasks": ({"skiplist_words": ["."], "skiplist_tasks": []}, {}, r"skiplist_tasks \[\] is not served"),
    "prefix": ({}, {"query_prefix": 5}, "query_prefix is 5; expected a text"),
    "document length": ({}, {"document_length": "long"}, "document_length is 'long'"),
    "marker": ({}, {"query_prefix": "[Q] "}, r"query_prefix '\[Q\] ' is a token that this tokenizer does not read"),
}


@pytest.mark.parametrize("name", LATE)
def test_late_interaction_that_is_not_served_is_refused(folder, name):
    mask, settings, reason = LATE[name]
    save_tokenizer(folder)
    write(folder / "modules.json", modules(MODULES[0], MODULES[2], ("3_MultiVectorMask", "MultiVectorMask")))
    write(folder / "3_MultiVectorMask/config.json", mask)
    change(folder, DENSE, module_input_name="token_embeddings")
    change(folder, TEXTS, **settings)
    with pytest.raises(ModelLoadError, match=reason):
        read_sentence_settings(folder, is_causal=False)


@pytest.mark.parametrize("key", ["skiplist_words", "attend_to_mask_tokens", "document_prefix", "query_length"])
def test_each_of_the_older_settings_means_that_queries_are_lengthened(folder, key):
    """As MultiVectorEncoder reads them: PyLate's default holds where one of its settings is there at all."""
    save_tokenizer(folder)
    write(folder / "modules.json", modules(MODULES[0], MODULES[2], ("3_MultiVectorMask", "MultiVectorMask")))
    change(folder, DENSE, module_input_name="token_embeddings")
    assert read_sentence_settings(folder, is_causal=False).query_expansion is None
    change(
        folder, TEXTS, **{key: {"skiplist_words": ["."], "document_prefix": "d ", "query_length": 20}.get(key, True)}
    )
    length, attended = 20 if key == "query_length" else 32, key == "attend_to_mask_tokens"
    expected = QueryExpansion(4, length, cut_to=length, attended=attended)
    assert read_sentence_settings(folder, is_causal=False).query_expansion == expected


def test_a_refusal_reaches_whoever_loads_the_model(folder, tmp_path_factory):
    """By way of the loader: the rows' width against the files', and a list of modules that is not served."""
    body = body_folder(tmp_path_factory.mktemp("body"))
    shutil.copytree(folder, body, dirs_exist_ok=True)
    stored = load_file(body / "model.safetensors")
    assert stored["embeddings.word_embeddings.weight"].shape[1] == 64
    write(body / "modules.json", modules(*MODULES[:2]))
    change(body, POOLING, word_embedding_dimension=63)
    with pytest.raises(ModelLoadError, match=r"1_Pooling.config\.json: takes rows of 63, but BertModel gives 64"):
        serve(body, self_check=False)
    write(body / "modules.json", modules(("", "Router")))
    with pytest.raises(ModelLoadError, match=r"modules\.json.*Router"):
        serve(body, self_check=False)
