"""How many tokens a text may have, as far as the model's body is concerned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# Where neither config nor tokenizer names a length. Relative position biases are defined at any, but the padded
# forward's memory grows with its square.
UNNAMED = 2048
# Tokenizers without a limit name an astronomic one.
MOST_NAMED = 10**7


def max_positions(config: Any, folder: Path, offset: int) -> int:
    """Tokens that the position table or the rotary training length allows.

    The config's ``max_position_embeddings`` (or ``n_positions``), less ``offset``, the entries of the table that no
    token uses; else the tokenizer's ``model_max_length``; else ``UNNAMED``. Rotary scaling (``rope_parameters``):
    yarn reaches ``original_max_position_embeddings`` x ``factor``; dynamic and longrope change every frequency once
    any text of a batch is longer than the original length, so they are served up to it; linear and llama3 configs
    already name the stretched length.
    """
    named = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    limit = int(named) - offset if named and named > 0 else _tokenizer_limit(folder)
    for rope in _rope_parameters(config):
        kind = rope.get("rope_type") or "default"
        original = rope.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        if kind == "yarn" and original:
            limit = max(limit, int(original * (rope.get("factor") or 1.0)))
        elif kind in ("dynamic", "longrope"):
            limit = min(limit, int(original or limit))
    return limit


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    """The rotary settings, one for all layers or one for each kind of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [each for each in parameters.values() if isinstance(each, dict)]
    return nested or [parameters]


def _tokenizer_limit(folder: Path) -> int:
    file = folder / "tokenizer_config.json"
    try:
        named = json.loads(file.read_text(encoding="utf-8")).get("model_max_length")
    except (OSError, ValueError):
        named = None
    return int(named) if isinstance(named, int | float) and 0 < named <= MOST_NAMED else UNNAMED
