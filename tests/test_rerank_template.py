"""Rerank templates: which folder gets which, what a malformed one is refused with, how places are filled in."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pyruntime.errors import ModelLoadError
from pyruntime.rerank_template import FILE_NAME, RerankWay, fill, find_template, rerank_way, with_rerank
from pyruntime.types import Capability, EmbeddingKind, QueryExpansion
from tests.fakes import byte_tokenizer, fake_model

QWEN, GEMMA = "Qwen3ForCausalLM", "GemmaForCausalLM"
OWN: dict[str, Any] = {"before": ["Q {query}\n"], "document": "D {document}", "after": ["?"], "labels": ["y", "n"]}


def own(folder: Path, **changes: Any) -> Path:
    data = {key: value for key, value in (OWN | changes).items() if value is not None}
    (folder / FILE_NAME).write_text(json.dumps(data))
    return folder


@pytest.mark.parametrize(
    ("folder", "architecture", "name"),
    [
        ("Qwen3-Reranker-0.6B", QWEN, "qwen3-reranker"),
        ("Qwen3-Reranker-0.6B-seq-cls", "Qwen3ForSequenceClassification", "qwen3-reranker"),
        ("models--Qwen--Qwen3-Reranker-4B/snapshots/0123abcd", QWEN, "qwen3-reranker"),
        ("bge-reranker-v2-gemma", GEMMA, "bge-reranker-v2-gemma"),
        ("Qwen3-0.6B", QWEN, None),
        ("Qwen3-Reranker-0.6B", "LlamaForCausalLM", None),
        ("Qwen3-Reranker-0.6B/merged", QWEN, None),
    ],
)
def test_packaged_templates_are_for_their_own(tmp_path: Path, folder: str, architecture: str, name: str | None):
    found = find_template(tmp_path / folder, architecture)
    assert (found and found.name) == name


def test_a_folders_own_template_goes_first(tmp_path: Path) -> None:
    folder = tmp_path / "Qwen3-Reranker-0.6B"
    folder.mkdir()
    found = find_template(own(folder), QWEN)
    assert found is not None
    assert (found.before, found.document, found.after) == (("Q {query}\n",), "D {document}", ("?",))
    assert (found.labels, found.instruction, found.leading_special_tokens) == (("y", "n"), None, True)
    (folder / FILE_NAME).write_text('{"template": "bge-reranker-v2-gemma"}')
    assert find_template(folder, QWEN).labels == ("Yes",)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"labels": ["a", "b", "c"]}, "not 3"),
        ({"labels": "yes"}, "labels must be a list of texts"),
        ({"before": ["no place"]}, "must have {query}"),
        ({"before": ["{query} {document}"]}, r"\['document', 'query'\]"),
        ({"document": "{document} behind"}, "document must be a text that ends in"),
        ({"document": "{query} {document}"}, "has no other place"),
        ({"document": None}, "document must be"),
        ({"after": [""]}, "after must be a list of texts"),
        ({"instruction": "unused"}, "instruction must be a text where a piece has"),
        ({"after": ["{instruction}"]}, "instruction must be"),
        ({"leading_special_tokens": 1}, "must be true or false"),
        ({"befor": []}, r"unknown keys \['befor'\]"),
    ],
)
def test_a_malformed_template_refuses_the_model(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelLoadError, match=says) as refused:
        find_template(own(tmp_path, **changes), QWEN)
    assert FILE_NAME in refused.value.message


@pytest.mark.parametrize(
    ("content", "says"), [("{", "line 1"), ("[]", "no JSON object"), ('{"template": "x"}', "'x' is not packaged")]
)
def test_a_file_that_is_no_template_refuses_the_model(tmp_path: Path, content: str, says: str) -> None:
    (tmp_path / FILE_NAME).write_text(content)
    with pytest.raises(ModelLoadError, match=says):
        find_template(tmp_path, QWEN)


def test_places_are_filled_in_once() -> None:
    values = {"query": "{instruction} {x}", "instruction": "i"}
    assert fill("{instruction}: {query} {other}", values) == "i: {instruction} {x} {other}"


def test_labels_are_one_token_each(tmp_path: Path) -> None:
    template = find_template(own(tmp_path), QWEN)
    assert template is not None
    assert template.bound(byte_tokenizer()).label_ids == (ord("y"), ord("n"))
    with pytest.raises(ModelLoadError, match="label 'yes' is 3 tokens"):
        replace(template, labels=("yes",)).bound(byte_tokenizer())


def test_the_way_is_decided_by_what_the_model_has(tmp_path: Path) -> None:
    template = find_template(own(tmp_path), QWEN)
    assert template is not None
    decoder = fake_model("d", {Capability.GENERATE, Capability.SCORE}).info
    classifier = fake_model("c", {Capability.CLASSIFY}, labels=("relevant",)).info
    two = replace(classifier, labels=("no", "yes"))
    tokens = replace(classifier, classifies_tokens=True)
    vectors = fake_model(
        "v", {Capability.EMBED}, embedding_kinds=frozenset({EmbeddingKind.PER_TOKEN}), late_interaction=True
    ).info
    assert rerank_way(decoder, template) is rerank_way(classifier, template) is RerankWay.TEMPLATE
    assert rerank_way(classifier, None) is RerankWay.PAIRS
    assert rerank_way(vectors, None) is RerankWay.LATE_INTERACTION
    unseen = replace(vectors, query_expansion=QueryExpansion(1, 32, cut_to=32, attended=False))
    assert rerank_way(decoder, replace(template, labels=())) is None
    assert rerank_way(unseen, None) is RerankWay.LATE_INTERACTION
    for info in (decoder, two, tokens, replace(vectors, late_interaction=False)):
        assert rerank_way(info, None) is None
        assert Capability.RERANK not in with_rerank(info, None).capabilities
    assert with_rerank(classifier, None).capabilities == {Capability.CLASSIFY, Capability.RERANK}


@pytest.mark.parametrize("label_ids", [(5, 1000), (-1,)])
def test_labels_that_the_model_has_not(tmp_path: Path, label_ids: tuple[int, ...]) -> None:
    template = find_template(own(tmp_path), QWEN)
    assert template is not None
    info = replace(fake_model("m", {Capability.GENERATE}).info, vocab_size=1000)
    with pytest.raises(ModelLoadError, match="outside the model's vocabulary of 1000"):
        with_rerank(info, replace(template, label_ids=label_ids))
    assert Capability.RERANK in with_rerank(info, replace(template, label_ids=(999, 0))).capabilities
