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
from pyruntime.model.folder_files import positive, read_json
from pyruntime.model.sentence_modules import ModuleEntry
from pyruntime.model.sentence_texts import model_config, transformer_config
from pyruntime.types import QueryExpansion

OLD_QUERY_LENGTH = 32
LENGTHS = ("query_length", "document_length", "query_expansion")
OLD_MARKERS = (*LENGTHS, "do_query_expansion", "attend_to_expansion_tokens", "query_prefix", "document_prefix")
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
    words, tasks = _mask(masks, config, is_old_layout(folder))
    settings: dict[str, Any] = {key: config[key] for key in LENGTHS if key in config}
    settings |= {key: inner[key] for key in LENGTHS if key in inner}
    source = inner_file if "query_expansion" in inner else file
    if "query_expansion" not in settings and any(key in config for key in OLD_MARKERS):
        settings["query_expansion"] = _old_expansion(config)
    length = settings.get("document_length")
    return LateSettings(
        skipped_ids=_skipped_ids(words, tokenizer),
        skips_in_queries="query" in tasks,
        max_tokens=positive(settings, "document_length", source) if length is not None else None,
        expansion=_expansion(settings.get("query_expansion"), tokenizer, source),
        prefixed=_prefixed(config, prompts, tokenizer, file),
    )


def _mask(masks: list[ModuleEntry], config: dict[str, Any], old: bool) -> tuple[list[str], list[str]]:
    """Words whose vectors are left out, and for which tasks."""
    if not masks:
        words = config.get("skiplist_words")
        return (list(string.punctuation) if words is None else list(words)) if old else [], ["document"]
    file = masks[0].config_file
    mask = read_json(file) if file.is_file() else {}
    if mask.get("keep_only_token_ids"):
        raise ModelLoadError(f"{file}: keep_only_token_ids is not served")
    tasks = mask.get("skiplist_tasks") or ["document"]
    tasks = [tasks] if isinstance(tasks, str) else list(tasks)
    words = list(mask.get("skiplist_words") or [])
    if words and "document" not in tasks:
        raise ModelLoadError(f"{file}: skiplist_tasks {tasks} is not served; served: document, or query and document")
    return words, tasks


def _skipped_ids(words: list[str], tokenizer: Any) -> tuple[int, ...]:
    """Words that are no token of their own would stand for every unknown token; they are left out of the list."""
    ids = {word: tokenizer.convert_tokens_to_ids(word) for word in words}
    unknown = tokenizer.unk_token_id
    known = {i for word, i in ids.items() if i is not None and (i != unknown or word == tokenizer.unk_token)}
    return tuple(sorted(known))


def _old_expansion(config: dict[str, Any]) -> dict[str, Any] | None:
    if config.get("do_query_expansion") is False:
        return None
    attended = config.get("attend_to_expansion_tokens", config.get("attend_to_mask_tokens"))
    length = config.get("query_length") or OLD_QUERY_LENGTH
    return {"strategy": "fixed", "attend": bool(attended), "length": length}


def _expansion(config: Any, tokenizer: Any, file: Path) -> QueryExpansion | None:
    if config is None:
        return None
    if not isinstance(config, dict) or config.get("strategy") not in ("fixed", "min"):
        raise ModelLoadError(f"{file}: query_expansion {config!r} is not served; served strategies: fixed, min")
    token = config.get("token")
    if token is not None:
        token_id = tokenizer.convert_tokens_to_ids(token)
    else:
        token_id = tokenizer.eos_token_id if tokenizer.mask_token_id is None else tokenizer.mask_token_id
    if token_id is None:
        raise ModelLoadError(f"{file}: query_expansion names no token, and the tokenizer has neither mask nor end")
    length = positive(config, "length", file)
    return QueryExpansion(int(token_id), length, config["strategy"] == "fixed", bool(config.get("attend", False)))


def _prefixed(config: dict[str, Any], prompts: dict[str, str], tokenizer: Any, file: Path) -> dict[str, str]:
    """Older folders put a marker token before texts. As a prompt it is the same where the tokenizer reads it whole."""
    found = dict(prompts)
    for key, name in PREFIXES:
        prefix = config.get(key) or ""
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
