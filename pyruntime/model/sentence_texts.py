"""How a sentence-transformers folder wants its texts: prompts, longest length, lower case, similarity.

Sources: ``config_sentence_transformers.json``, ``sentence_bert_config.json`` (and its older names) and the tokenizer's
own files, read as sentence-transformers reads them. A setting that would change answers and is not served refuses the
model by name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyruntime.errors import ModelLoadError
from pyruntime.model.folder_files import optional_json, positive, typed

TRANSFORMER_CONFIGS = [
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
]
SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")
# Constructor options that change where weights come from or how fast they run, not what comes out.
HARMLESS_OPTIONS = {"dtype", "torch_dtype", "attn_implementation", "trust_remote_code", "padding_side", "use_fast"}
OPTION_FIELDS = ("model_args", "model_kwargs", "tokenizer_args", "processor_kwargs", "config_args", "config_kwargs")
# A tokenizer without a limit of its own says so by an absurd one.
NO_LIMIT = 10**9


@dataclass(frozen=True, slots=True)
class TextSettings:
    """``max_tokens``: the folder's own length limit, or None. ``dimensions``: the cut that it asks for, or None."""

    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    similarity: str = ""
    dimensions: int | None = None
    max_tokens: int | None = None


def transformer_config(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The Transformer module's own configuration and its file, under the first of its names that is there."""
    files = [folder / name for name in TRANSFORMER_CONFIGS]
    file = next((file for file in files if file.is_file()), files[0])
    return file, optional_json(file)


def model_config(folder: Path) -> tuple[Path, dict[str, Any]]:
    """``config_sentence_transformers.json``: its path and content, empty where it is missing."""
    file = folder / "config_sentence_transformers.json"
    return file, optional_json(file)


def read_text_settings(folder: Path) -> TextSettings:
    """What every kind of sentence-transformers model says of its texts. Raises ``ModelLoadError``."""
    file, config = model_config(folder)
    prompts = config.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ModelLoadError(f"{file}: prompts must be texts by name")
    default = typed(config, "default_prompt_name", str, file)
    if default is not None and default not in prompts:
        raise ModelLoadError(f"{file}: default_prompt_name {default!r} is none of the prompts {sorted(prompts)}")
    similarity = config.get("similarity_fn_name") or "cosine"
    return TextSettings(
        prompts=dict(prompts),
        default_prompt_name=default,
        similarity=similarity if similarity in SIMILARITIES else "",
        dimensions=positive(config, "truncate_dim", file) if config.get("truncate_dim") is not None else None,
        max_tokens=_max_tokens(folder),
    )


def check_transformer(folder: Path, task: str) -> None:
    """Refuse a Transformer module that does not run ``task`` over plain text as the packed forward does."""
    file, config = transformer_config(folder)
    found = config.get("transformer_task", task)
    if found != task:
        raise ModelLoadError(f"{file}: transformer_task {found!r} is not served here; served: {task!r}")
    _check_modalities(file, config, "logits" if task == "fill-mask" else "last_hidden_state")
    for name in OPTION_FIELDS:
        unknown = sorted(set(typed(config, name, dict, file) or {}) - HARMLESS_OPTIONS)
        if unknown:
            raise ModelLoadError(f"{file}: {name} {unknown} are not served")
    if config.get("processing_kwargs"):
        raise ModelLoadError(f"{file}: processing_kwargs is not served")
    if config.get("do_lower_case") and not _lowers(optional_json(folder / "tokenizer.json").get("normalizer")):
        raise ModelLoadError(f"{file}: do_lower_case is not served with a tokenizer that does not do it itself")


def _check_modalities(file: Path, config: dict[str, Any], output: str) -> None:
    modalities = config.get("modality_config")
    if modalities is None:
        return
    text = modalities.get("text") if isinstance(modalities, dict) else None
    if text != {"method": "forward", "method_output_name": output}:
        raise ModelLoadError(f"{file}: modality_config takes text as {text!r}; served: forward with {output}")


def _max_tokens(folder: Path) -> int | None:
    """``max_seq_length``; without it the tokenizer's own limit, which sentence-transformers truncates at as well."""
    file, config = transformer_config(folder)
    if config.get("max_seq_length") is not None:
        return positive(config, "max_seq_length", file)
    limit = optional_json(folder / "tokenizer_config.json").get("model_max_length")
    usable = isinstance(limit, int | float) and 0 < limit < NO_LIMIT
    return int(limit) if usable else None  # type: ignore[arg-type]


def _lowers(normalizer: Any) -> bool:
    if not isinstance(normalizer, dict):
        return False
    if normalizer.get("type") == "Sequence":
        return any(_lowers(part) for part in normalizer.get("normalizers") or [])
    return normalizer.get("type") == "Lowercase" or bool(normalizer.get("lowercase"))
