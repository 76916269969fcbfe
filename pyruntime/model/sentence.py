"""How a folder wants its embeddings made: the sentence-transformers files, read and never guessed.

Sources: ``modules.json``, ``1_Pooling/config.json`` in both schemas, ``sentence_bert_config.json`` and
``config_sentence_transformers.json``. What is not supported refuses the model by name.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyruntime.errors import ModelLoadError
from pyruntime.types import PoolingType

POOLING_FLAGS = {
    "pooling_mode_lasttoken": PoolingType.LAST,
    "pooling_mode_cls_token": PoolingType.CLS,
    "pooling_mode_mean_tokens": PoolingType.MEAN,
}
POOLING_NAMES = {"lasttoken": PoolingType.LAST, "cls": PoolingType.CLS, "mean": PoolingType.MEAN}
SERVED_MODULES = ("Transformer", "Pooling", "Normalize")


@dataclass(frozen=True, slots=True)
class SentenceSettings:
    """Defaults of Embed for one model. ``max_tokens``: the folder's own length limit, or None."""

    pooling: PoolingType
    normalize: bool
    max_tokens: int | None = None
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None


def needs_masked_lm(folder: Path) -> bool:
    """Whether the folder's modules read the masked-language-model head (SPLADE), so that it has to be loaded."""
    modules = _read(folder / "modules.json") if (folder / "modules.json").is_file() else []
    return any(module["type"].rsplit(".", 1)[-1] == "MLMTransformer" for module in modules)


def read_sentence_settings(folder: Path, is_causal: bool) -> SentenceSettings:
    """Without sentence-transformers files: MEAN for encoders, LAST for decoders, normalised."""
    modules_file = folder / "modules.json"
    if not modules_file.is_file():
        return SentenceSettings(PoolingType.LAST if is_causal else PoolingType.MEAN, normalize=True)
    modules = {module["type"].rsplit(".", 1)[-1]: folder / module["path"] for module in _read(modules_file)}
    unknown = [name for name in modules if name not in SERVED_MODULES]
    if unknown:
        raise ModelLoadError(f"{modules_file}: modules {unknown} are not served; served: {list(SERVED_MODULES)}")
    if "Pooling" not in modules:
        raise ModelLoadError(f"{modules_file}: no Pooling module, so it does not say how rows become one vector")
    limit = _optional(folder / "sentence_bert_config.json").get("max_seq_length")
    texts = _optional(folder / "config_sentence_transformers.json")
    return SentenceSettings(
        pooling=_pooling(modules["Pooling"] / "config.json"),
        normalize="Normalize" in modules,
        max_tokens=limit,
        prompts=dict(texts.get("prompts") or {}),
        default_prompt_name=texts.get("default_prompt_name"),
    )


def _pooling(file: Path) -> PoolingType:
    config = _read(file)
    if not config.get("include_prompt", True):
        raise ModelLoadError(f"{file}: include_prompt false is not served yet")
    mode = config.get("pooling_mode")
    if isinstance(mode, str):
        if mode not in POOLING_NAMES:
            raise ModelLoadError(f"{file}: pooling_mode {mode!r} is not served; served: {sorted(POOLING_NAMES)}")
        return POOLING_NAMES[mode]
    chosen = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    if len(chosen) != 1 or chosen[0] not in POOLING_FLAGS:
        raise ModelLoadError(f"{file}: pooling {chosen} is not served; served: exactly one of {sorted(POOLING_FLAGS)}")
    return POOLING_FLAGS[chosen[0]]


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{file}: {error}") from error


def _optional(file: Path) -> dict[str, Any]:
    return _read(file) if file.is_file() else {}
