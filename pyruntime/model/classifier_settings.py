"""What a classifier's folder says of its labels, its activation and its texts; read and never guessed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from pyruntime.errors import ModelLoadError
from pyruntime.model.sentence import SentenceSettings
from pyruntime.model.sentence_modules import read_json
from pyruntime.model.sentence_texts import model_config, optional_json, read_text_settings, transformer_config
from pyruntime.types import PoolingType

# By the class names of torch.nn that a folder may write down. Each maps logits [N, labels] to the same shape, row by
# row. The list is closed: a name from a file is never imported.
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Identity": lambda logits: logits,
    "Sigmoid": torch.sigmoid,
    "Softmax": lambda logits: torch.softmax(logits, dim=-1),
    "LogSoftmax": lambda logits: torch.log_softmax(logits, dim=-1),
    "LogSigmoid": functional.logsigmoid,
    "Tanh": torch.tanh,
    "ReLU": torch.relu,
    "Softplus": functional.softplus,
}
# What the Transformer module of a CrossEncoder may say: a sequence classifier over plain text, and its length limit.
TASK = "sequence-classification"
MODALITIES = {"text": {"method": "forward", "method_output_name": "logits"}}
TRANSFORMER_KEYS = {"transformer_task", "modality_config", "module_output_name", "max_seq_length"}
PROBLEM_TYPES = {"regression": "Identity", "multi_label_classification": "Sigmoid"}


def label_names(folder: Path, config: Any) -> tuple[str, ...]:
    """Labels by index. Raises ``ModelLoadError`` where ``id2label`` skips an index or contradicts ``num_labels``."""
    file = folder / "config.json"
    names = {int(key): str(value) for key, value in config.id2label.items()}
    if sorted(names) != list(range(len(names))) or not names:
        raise ModelLoadError(f"{file}: id2label must name 0..n-1, it names {sorted(names)}")
    # transformers makes up names for as many labels as num_labels says, in silence.
    stored = optional_json(file)
    count, given = stored.get("num_labels"), stored.get("id2label")
    if count is not None and given is not None and count != len(given):
        raise ModelLoadError(f"{file}: num_labels is {count}, but id2label names {len(given)} labels")
    return tuple(names[index] for index in range(len(names)))


def activation_name(folder: Path, config: Any, num_labels: int) -> str:
    """Key of ``ACTIVATIONS``: what sentence-transformers' files say, else by ``problem_type`` and number of labels.

    Sources, first found wins: ``activation_fn`` of a cross-encoder's ``config_sentence_transformers.json``, of
    ``sentence_transformers`` in ``config.json``, and the older ``sbert_ce_default_activation_function`` there. Else
    ``problem_type``: identity for regression, sigmoid for several labels at once; else sigmoid for one label and
    softmax for more. Raises ``ModelLoadError`` for a name that is not in the list.
    """
    for file, value in _stated(folder, config):
        if value is not None:
            return _known(file, str(value))
    problem = getattr(config, "problem_type", None)
    return PROBLEM_TYPES.get(str(problem), "Sigmoid" if num_labels == 1 else "Softmax")


def _stated(folder: Path, config: Any) -> list[tuple[Path, Any]]:
    own = folder / "config.json"
    newer, settings = model_config(folder)
    block = getattr(config, "sentence_transformers", None) or {}
    return [
        (newer, settings.get("activation_fn")),
        (own, block.get("activation_fn")),
        (own, getattr(config, "sbert_ce_default_activation_function", None)),
    ]


def _known(file: Path, dotted: str) -> str:
    name = dotted.rsplit(".", 1)[-1]
    if not dotted.startswith("torch.nn.") or name not in ACTIVATIONS:
        served = [f"torch.nn.{known}" for known in ACTIVATIONS]
        raise ModelLoadError(f"{file}: activation function {dotted} is not served; served: {served}")
    return name


def read_cross_encoder_settings(folder: Path) -> SentenceSettings:
    """The length limit of a classifier's folder; it makes no embeddings, so nothing else of Embed's settings counts.

    With the files of a sentence-transformers ``CrossEncoder``, these must say no more than that pairs go through the
    model. Raises ``ModelLoadError`` with the file's name for anything else in them that would change scores.
    """
    _check_modules(folder)
    texts = read_text_settings(folder)
    if texts.default_prompt_name is not None:
        problem = f"default_prompt_name {texts.default_prompt_name!r} is not served for a classifier"
        raise ModelLoadError(f"{model_config(folder)[0]}: {problem}")
    file, config = transformer_config(folder)
    unknown = sorted(key for key in set(config) - TRANSFORMER_KEYS if config[key])
    if unknown:
        raise ModelLoadError(f"{file}: {unknown} are not served for a classifier; served: {sorted(TRANSFORMER_KEYS)}")
    if config.get("transformer_task", TASK) != TASK or config.get("modality_config", MODALITIES) != MODALITIES:
        raise ModelLoadError(f"{file}: served for a classifier: transformer_task {TASK!r} with {MODALITIES}")
    return SentenceSettings(PoolingType.CLS, normalize=False, max_tokens=texts.max_tokens, kinds=frozenset())


def _check_modules(folder: Path) -> None:
    file = folder / "modules.json"
    if not file.is_file():
        return
    modules = read_json(file)
    kinds = [module.get("type") if isinstance(module, dict) else module for module in modules]
    known = [str(kind).rsplit(".", 1)[-1] for kind in kinds if str(kind).startswith("sentence_transformers.")]
    if known != ["Transformer"] or len(kinds) != 1 or modules[0].get("path"):
        problem = "a classifier's folder with one Transformer module beside the file is served"
        raise ModelLoadError(f"{file}: modules {kinds}; {problem}")
