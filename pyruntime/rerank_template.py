"""How a decoder reads a query and a document for reranking: data, found by the folder's own signs.

Packaged templates lie in ``pyruntime/templates``. A folder's own ``rerank_template.json`` goes before them: either a
whole template without ``match``, or ``{"template": "qwen3-reranker"}``, which names a packaged one. A decoder with
neither cannot rerank: what it was trained to read is not guessed.

A template is an object of

    name                    for messages; default: the file's name
    source                  where it is described; not read
    match                   architectures: class names in the config; name: a regular expression, searched without
                            regard to case in the folder's name, or the hub's name of it
    before, after           pieces around the document; {query} and {instruction} are filled in. Each is tokenised on
                            its own, so what stands before the document is computed once for all documents
    document                the document's own piece, with {document} at its end
    leading_special_tokens  whether the tokenizer's beginning-of-sequence token stands at the start; default true
    labels                  one: its logit is the raw score; two: that of the first minus that of the second. The score
                            is the raw score's sigmoid, which for two is their softmax. None or not read for a model
                            with a classifier of one label: that is asked instead
    instruction             what {instruction} is unless the request says; none where no piece has it
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyruntime.errors import ModelLoadError
from pyruntime.types import Capability, EmbeddingKind, ModelInfo

if TYPE_CHECKING:
    from pyruntime.tokenization import Tokenizer

FILE_NAME = "rerank_template.json"
PACKAGED = Path(__file__).parent / "templates"
_PLACES = re.compile(r"\{(\w+)\}")
_KEYS = {"name", "source", "match", "before", "document", "after", "leading_special_tokens", "labels", "instruction"}


@dataclass(frozen=True, slots=True)
class RerankTemplate:
    """One template, checked. ``instruction`` is None where the template takes none.

    ``label_ids``: the labels in the tokenizer's ids, none before ``bound``. ``activation``: ``sigmoid`` or
    ``identity``, what makes a score of the labels' logits.
    """

    name: str
    before: tuple[str, ...]
    document: str
    after: tuple[str, ...]
    leading_special_tokens: bool
    labels: tuple[str, ...]
    instruction: str | None
    label_ids: tuple[int, ...] = ()
    activation: str = "sigmoid"

    @property
    def text(self) -> str:
        """All that the template itself writes."""
        return "\n".join((*self.before, self.document, *self.after, self.instruction or ""))

    def bound(self, tokenizer: Tokenizer) -> RerankTemplate:
        """With the labels' ids. ``ModelLoadError`` where a label is not exactly one token."""
        encoded = tokenizer.encode_batch(list(self.labels), special_tokens=False)
        for label, ids in zip(self.labels, encoded, strict=True):
            if len(ids) != 1:
                raise ModelLoadError(f"rerank template {self.name}: label {label!r} is {len(ids)} tokens, not one")
        return replace(self, label_ids=tuple(ids[0] for ids in encoded))


class RerankWay(enum.Enum):
    """How a model ranks: a template around both texts, a classifier over the pair, vectors a token."""

    TEMPLATE = "template"
    PAIRS = "pairs"
    LATE_INTERACTION = "late interaction"


def rerank_way(info: ModelInfo, template: RerankTemplate | None) -> RerankWay | None:
    """The one place that decides how a model ranks; None: it does not."""
    has_relevance = Capability.CLASSIFY in info.capabilities and len(info.labels) == 1 and not info.classifies_tokens
    reads_labels = Capability.GENERATE in info.capabilities and template is not None and template.labels
    if template is not None and (has_relevance or reads_labels):
        return RerankWay.TEMPLATE
    if has_relevance:
        return RerankWay.PAIRS
    if info.late_interaction and EmbeddingKind.PER_TOKEN in info.embedding_kinds:
        return RerankWay.LATE_INTERACTION
    return None


def with_rerank(info: ModelInfo, template: RerankTemplate | None) -> ModelInfo:
    """``info`` with RERANK among its capabilities exactly where ``rerank_way`` knows a way.

    ``ModelLoadError`` for a template whose labels are not all among the model's tokens.
    """
    outside = [i for i in template.label_ids if not 0 <= i < info.vocab_size] if template is not None else []
    if template is not None and outside:
        problem = f"label tokens {outside} are outside the model's vocabulary of {info.vocab_size}"
        raise ModelLoadError(f"model {info.name!r}: rerank template {template.name}: {problem}")
    others = info.capabilities - {Capability.RERANK}
    able = {Capability.RERANK} if rerank_way(info, template) is not None else set()
    return replace(info, capabilities=others | able)


def find_template(folder: Path, architecture: str) -> RerankTemplate | None:
    """The folder's own template, else the packaged one that fits, else None.

    Raises ``ModelLoadError``, which names file and key, for a template file that is malformed.
    """
    own = folder / FILE_NAME
    if own.is_file():
        data = _read(own)
        if set(data) != {"template"}:
            return _checked(data, own)
        names = {str(_read(file)["name"]): file for file in sorted(PACKAGED.glob("*.json"))}
        if data["template"] not in names:
            raise ModelLoadError(f"{own}: template {data['template']!r} is not packaged; packaged: {sorted(names)}")
        file = names[data["template"]]
        return _checked(_read(file), file)
    for file in sorted(PACKAGED.glob("*.json")):
        data = _read(file)
        if _fits(data["match"], folder, architecture):
            return _checked(data, file)
    return None


def fill(piece: str, values: Mapping[str, str]) -> str:
    """The piece with its places filled in, once: braces inside the values stay as they are."""
    return _PLACES.sub(lambda place: values.get(place[1], place[0]), piece)


def _fits(match: Mapping[str, Any], folder: Path, architecture: str) -> bool:
    """A hub snapshot lies in models--OWNER--NAME/snapshots/REVISION."""
    names = [folder.name, folder.parent.parent.name if folder.parent.name == "snapshots" else ""]
    return architecture in match["architectures"] and any(re.search(match["name"], name, re.I) for name in names)


def _read(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{file}: {error}") from error
    if not isinstance(data, dict):
        raise ModelLoadError(f"{file}: is no JSON object")
    return data


def _checked(data: dict[str, Any], file: Path) -> RerankTemplate:
    if unknown := sorted(set(data) - _KEYS):
        raise ModelLoadError(f"{file}: unknown keys {unknown}; known: {sorted(_KEYS)}")
    before, after, labels = (_texts(data, key, file) for key in ("before", "after", "labels"))
    document, instruction = data.get("document"), data.get("instruction")
    leading = data.get("leading_special_tokens", True)
    if not isinstance(document, str) or not document.endswith("{document}") or len(_PLACES.findall(document)) != 1:
        raise ModelLoadError(f"{file}: document must be a text that ends in {{document}} and has no other place")
    if not isinstance(leading, bool):
        raise ModelLoadError(f"{file}: leading_special_tokens must be true or false")
    if len(labels) > 2:
        raise ModelLoadError(f"{file}: labels must be at most two texts, not {len(labels)}")
    places = {place for piece in before + after for place in _PLACES.findall(piece)}
    if "query" not in places or places - {"query", "instruction"}:
        raise ModelLoadError(
            f"{file}: before and after must have {{query}}, may have {{instruction}}: {sorted(places)}"
        )
    if ("instruction" in places) != isinstance(instruction, str):
        problem = "must be a text where a piece has {instruction}, and absent elsewhere"
        raise ModelLoadError(f"{file}: instruction {problem}")
    return RerankTemplate(str(data.get("name", file.name)), before, document, after, leading, labels, instruction)


def _texts(data: dict[str, Any], key: str, file: Path) -> tuple[str, ...]:
    value = data.get(key, [])
    if not isinstance(value, list) or not all(isinstance(each, str) and each for each in value):
        raise ModelLoadError(f"{file}: {key} must be a list of texts")
    return tuple(value)
