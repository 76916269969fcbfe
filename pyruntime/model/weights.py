"""Which transformers class a folder asks for, and its weights in it, all of them or a refusal."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTextEncoding,
    AutoModelForTokenClassification,
)

from pyruntime.errors import ModelLoadError
from pyruntime.model.attention import IMPLEMENTATION
from pyruntime.model.sentence import needs_masked_lm

CAUSAL_SUFFIXES = ("ForCausalLM", "LMHeadModel")
SEQUENCE_CLASSIFIER_SUFFIX = "ForSequenceClassification"
TOKEN_CLASSIFIER_SUFFIX = "ForTokenClassification"
CLASSIFIER_SUFFIXES = (SEQUENCE_CLASSIFIER_SUFFIX, TOKEN_CLASSIFIER_SUFFIX)
PLAIN_SUFFIXES = ("Model", "ForMaskedLM", "ForPreTraining")
# The first suffix that fits decides: "EncoderModel", the encoder half of an encoder-decoder, stands before "Model".
LOADERS: dict[str, Any] = {
    **dict.fromkeys(CAUSAL_SUFFIXES, AutoModelForCausalLM),
    SEQUENCE_CLASSIFIER_SUFFIX: AutoModelForSequenceClassification,
    TOKEN_CLASSIFIER_SUFFIX: AutoModelForTokenClassification,
    "EncoderModel": AutoModelForTextEncoding,
    **dict.fromkeys(PLAIN_SUFFIXES, AutoModel),
}
# A plain encoder saved without the pooler that transformers would add: embedding does not read it.
UNUSED_WEIGHTS = ("pooler.",)


def refuse_adapter(folder: Path) -> None:
    """Raises ``ModelLoadError`` for a PEFT adapter, which is a difference to weights that are elsewhere."""
    file = folder / "adapter_config.json"
    if file.is_file():
        raise ModelLoadError(f"{file}: a PEFT adapter is not served; merge it into its base model and serve the result")


def load_weights(folder: Path, architecture: str, dtype: torch.dtype) -> Any:
    """The model of class ``architecture``, or of its body where only that is read.

    ``…ForMaskedLM`` keeps its head where the folder's modules read it (SPLADE). Raises ``ModelLoadError`` for a class
    that is not transformers' own or not served, and for weights that are missing, of another shape, or left over in
    the layers.
    """
    if not hasattr(transformers, architecture):
        raise ModelLoadError(
            f"{folder / 'config.json'}: architecture {architecture} is not one of transformers' own, and remote code "
            "is never run"
        )
    loader = _loader(folder, architecture)
    model, report = loader.from_pretrained(
        folder,
        dtype=dtype,
        attn_implementation=IMPLEMENTATION,
        output_loading_info=True,
        # Reported below by name; transformers' own error names neither the weight nor the shapes.
        ignore_mismatched_sizes=True,
        trust_remote_code=False,
    )
    ignored = UNUSED_WEIGHTS if loader is AutoModel else ()
    missing = sorted(key for key in report["missing_keys"] if not key.startswith(ignored))
    mismatched = [
        f"{key} is {list(stored)} in the file and {list(wanted)} by config.json"
        for key, stored, wanted in sorted(report["mismatched_keys"])
    ]
    left_over = _left_over(model, report["unexpected_keys"])
    if missing or mismatched or left_over:
        problem = f"the weights do not fit config.json; missing {missing}, mismatched {mismatched}, unused {left_over}"
        raise ModelLoadError(f"{folder}: {problem}")
    if architecture.endswith(CLASSIFIER_SUFFIXES) and type(model).__name__ != architecture:
        problem = f"architecture {architecture}, but its model_type loads as {type(model).__name__}"
        raise ModelLoadError(f"{folder / 'config.json'}: {problem}")
    return model


def _left_over(model: Any, unused: Iterable[str]) -> list[str]:
    """Of the file's weights without a place in the model, those of its layers: the config has fewer layers, or no bias.

    The others are of heads that are not read, or buffers that older versions stored.
    """
    known, modules, prefix = set(model.state_dict()), dict(model.named_modules()), f"{model.base_model_prefix}."

    def is_of_a_layer(name: str) -> bool:
        parent = modules.get(name.rpartition(".")[0])
        if parent is not None and parent._parameters and not parent._modules:
            return True
        return re.sub(r"\.\d+\.", ".0.", name, count=1) in known  # a layer past the last one looks like the first

    return sorted(key for key in unused if any(map(is_of_a_layer, (key, key.removeprefix(prefix), prefix + key))))


def _loader(folder: Path, architecture: str) -> Any:
    if needs_masked_lm(folder):
        if not architecture.endswith("ForMaskedLM"):
            problem = f"the modules read a masked-language-model head, which {architecture} has not"
            raise ModelLoadError(f"{folder / 'modules.json'}: {problem}")
        return AutoModelForMaskedLM
    for suffix, loader in LOADERS.items():
        if architecture.endswith(suffix):
            return loader
    served = [f"…{suffix}" for suffix in LOADERS]
    raise ModelLoadError(f"{folder}: architecture {architecture} is not served; served: {served}")
