"""Fake models that rank and classify, and a small tokenizer that knows pairs."""

from __future__ import annotations

from dataclasses import replace

from pyruntime.registry import ServedModel
from pyruntime.rerank_template import RerankTemplate
from pyruntime.tokenization import Tokenizer
from pyruntime.types import Capability, EmbeddingKind
from tests.fakes import BOS, EOS, fake_model
from tests.service.conftest import Stack

TEMPLATE = RerankTemplate(
    "test", ("S\n", "{instruction}|{query}\n"), "D: {document}", (" E",), True, ("y", "n"), "find"
)


def pair_tokenizer(plain: Tokenizer) -> Tokenizer:
    """The bytes of the fakes, a pair as <s> first </s> second </s> with token types 0 and 1."""
    from tokenizers import processors

    plain._backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=[("<s>", BOS), ("</s>", EOS)]
    )
    plain._hf.model_input_names = ["input_ids", "token_type_ids"]
    return Tokenizer(plain._hf)


def classifier(name: str, *labels: str, **changes: object) -> ServedModel:
    """Ranks as well where it has one label."""
    able = {Capability.CLASSIFY} | ({Capability.RERANK} if len(labels) == 1 else set())
    model = fake_model(name, able, labels=labels, **changes)
    return replace(model, tokenizer=pair_tokenizer(model.tokenizer))


def template_ranker(name: str, template: RerankTemplate = TEMPLATE) -> ServedModel:
    model = fake_model(name, {Capability.GENERATE, Capability.SCORE, Capability.RERANK}, context_length=80)
    return replace(model, rerank_template=template.bound(model.tokenizer))


def late_interaction_ranker(name: str, **changes: object) -> ServedModel:
    return fake_model(
        name,
        {Capability.EMBED, Capability.RERANK},
        embedding_kinds=frozenset({EmbeddingKind.PER_TOKEN}),
        token_embedding_dimensions=5,
        late_interaction=True,
        prompts={"query": "?", "document": "!"},
        **changes,
    )


def serve(stack: Stack, *models: ServedModel) -> None:
    for model in models:
        stack.registry.declare(model.info.name)
        stack.registry.set_serving(model.info.name, model)
