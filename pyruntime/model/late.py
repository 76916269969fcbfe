"""Late-interaction folders (ColBERT style): one projected vector a token, and what is special about queries.

Read as sentence-transformers' MultiVectorEncoder reads its own folders and PyLate's: a ``MultiVectorMask`` module or
the older top-level settings name words whose vectors documents leave out, how long documents may be, and how queries
are lengthened.
"""

from __future__ import annotations

import string
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from pyruntime.errors import ModelLoadError
from pyruntime.model.folder_files import optional_json, positive, typed, words
from pyruntime.model.sentence_modules import ModuleEntry
from pyruntime.model.sentence_texts import model_config, transformer_config
from pyruntime.types import QueryExpansion

OLD_QUERY_LENGTH = 32
LENGTHS = ("query_length", "document_length", "query_expansion")
OLD_MARKERS = (
    *(*LENGTHS, "do_query_expansion", "attend_to_expansion_tokens", "attend_to_mask_tokens"),
    *("query_prefix", "document_prefix", "skiplist_words"),
)
PREFIXES = (("query_prefix", "query"), ("document_prefix", "document"))


@dataclass(frozen=True, slots=True)
class LateSettings:
    """``skipped_ids``: tokens without a vector, of queries too where ``skips_in_queries``.

    ``prefixed``: the folder's prompts with the older settings' prefixes before them.
    """

    skipped_ids: tuple[int, ...]
    skips_in_queries: bool
    max_tokens: int | None
    expansion: QueryExpansion | None
    prefixed: dict[str, str]


def is_old_layout(folder: Path) -> bool:
    """Whether the folder is PyLate's of before the mask and the normalisation were modules of their own."""
    return bool(model_config(folder)[1].get("model_type") == "ColBERT")


def read_late(folder: Path, masks: list[ModuleEntry], prompts: dict[str, str]) -> LateSettings:
    """``masks``: the folder's MultiVectorMask modules, none or one. Raises ``ModelLoadError``."""
    file, config = model_config(folder)
    inner_file, inner = transformer_config(folder)
    tokenizer = _tokenizer(folder)
    skipped, tasks = _mask(masks, file, config, is_old_layout(folder))
    settings: dict[str, Any] = {key: config[key] for key in LENGTHS if key in config}
    settings |= {key: inner[key] for key in LENGTHS if key in inner}
    source = inner_file if "query_expansion" in inner else file
    if "query_expansion" not in settings and any(key in config for key in OLD_MARKERS):
        settings["query_expansion"] = _old_expansion(config)
    length = settings.get("document_length")
    return LateSettings(
        skipped_ids=_skipped_ids(skipped, tokenizer),
        skips_in_queries="query" in tasks,
        max_tokens=positive(settings, "document_length", source) if length is not None else None,
        expansion=_expansion(settings, tokenizer, source),
        prefixed=_prefixed(config, prompts, tokenizer, file),
    )


def _mask(masks: list[ModuleEntry], source: Path, config: dict[str, Any], old: bool) -> tuple[list[str], list[str]]:
    """Words whose vectors are left out, and for which tasks."""
    if not masks:
        skipped = words(config, "skiplist_words", source)
        return (list(string.punctuation) if skipped is None else skipped) if old else [], ["document"]
    file = masks[0].config_file
    mask = optional_json(file)
    if mask.get("keep_only_token_ids"):
        raise ModelLoadError(f"{file}: keep_only_token_ids is not served")
    tasks = words(mask, "skiplist_tasks", file)
    tasks = ["document"] if tasks is None else tasks
    skipped = words(mask, "skiplist_words", file) or []
    if skipped and "document" not in tasks:
        raise ModelLoadError(f"{file}: skiplist_tasks {tasks} is not served; served: document, or query and document")
    return skipped, tasks


def _skipped_ids(skipped: list[str], tokenizer: Any) -> tuple[int, ...]:
    """Words that are no token of their own would stand for every unknown token; they are left out of the list."""
    ids = {word: tokenizer.convert_tokens_to_ids(word) for word in skipped}
    unknown = tokenizer.unk_token_id
    known = {i for word, i in ids.items() if i is not None and (i != unknown or word == tokenizer.unk_token)}
    return tuple(sorted(known))


def _old_expansion(config: dict[str, Any]) -> dict[str, Any] | None:
    if config.get("do_query_expansion") is False:
        return None
    attended = config.get("attend_to_expansion_tokens", config.get("attend_to_mask_tokens"))
    length = config.get("query_length") or OLD_QUERY_LENGTH
    return {"strategy": "fixed", "attend": bool(attended), "length": length}


def _expansion(settings: dict[str, Any], tokenizer: Any, file: Path) -> QueryExpansion | None:
    """Without an expansion ``query_length`` cuts; with ``min``, it cuts where it is above the least length."""
    config = settings.get("query_expansion")
    most = positive(settings, "query_length", file) if settings.get("query_length") is not None else None
    if config is None:
        return QueryExpansion(0, 0, most, attended=True) if most is not None else None
    if not isinstance(config, dict) or config.get("strategy") not in ("fixed", "min"):
        raise ModelLoadError(f"{file}: query_expansion {config!r} is not served; served strategies: fixed, min")
    token = typed(config, "token", str, file)
    if token is not None:
        token_id = tokenizer.convert_tokens_to_ids(token)
    else:
        token_id = tokenizer.eos_token_id if tokenizer.mask_token_id is None else tokenizer.mask_token_id
    if token_id is None:
        raise ModelLoadError(f"{file}: query_expansion names no token, and the tokenizer has neither mask nor end")
    length = positive(config, "length", file)
    cut_to = length if config["strategy"] == "fixed" else most and max(most, length)
    return QueryExpansion(int(token_id), length, cut_to, bool(config.get("attend", False)))


def _prefixed(config: dict[str, Any], prompts: dict[str, str], tokenizer: Any, file: Path) -> dict[str, str]:
    """Older folders put a marker token before texts. As a prompt it is the same where the tokenizer reads it whole."""
    found = dict(prompts)
    for key, name in PREFIXES:
        prefix = typed(config, key, str, file) or ""
        if not prefix:
            continue
        vocabulary = tokenizer.get_vocab()
        for marker in (prefix, prefix.split(None, 1)[0] if prefix.split() else ""):
            if marker in vocabulary and tokenizer.tokenize(marker) != [marker]:
                raise ModelLoadError(f"{file}: {key} {prefix!r} is a token that this tokenizer does not read in texts")
        found[name] = prefix + found.get(name, "").removeprefix(prefix)
    return found


def _tokenizer(folder: Path) -> Any:
    try:
        return AutoTokenizer.from_pretrained(str(folder))
    except Exception as error:
        raise ModelLoadError(f"{folder}: tokenizer: {error}") from error
