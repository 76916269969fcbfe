"""The rerank template of a decoder that sentence-transformers saved as a ``CrossEncoder``.

Such a folder says all that is needed: ``modules.json`` ends in ``LogitScore``, whose config names the token ids that
are compared, and the chat template writes messages of the roles ``query`` and ``document``, a prompt as ``system``
before them.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyruntime.errors import CapabilityMissing, InvalidField, ModelLoadError
from pyruntime.rerank_template import RerankTemplate, fill, find_template

if TYPE_CHECKING:
    from pyruntime.tokenization import Tokenizer

# Texts that stand for the three places while the template is rendered: of Unicode's private use, so in no template.
QUERY, DOCUMENT, INSTRUCTION = "\ue001\ue001", "\ue002\ue002", "\ue003\ue003"
ACTIVATIONS = {"Sigmoid": "sigmoid", "Identity": "identity"}
# Of the settings for rendering, what concerns the tokens that come of it, which the service decides.
NOT_RENDERED = {"restore_suffix", "padding", "truncation", "max_length", "return_tensors"}
# What a template or a tokenizer may treat in its own way: white space at the ends, line breaks, marks, digits.
PROBES = [
    ("what is it?", "a river of stone"),
    (" two  words ", " of white space "),
    ('say "x"!', '\n\nlines\n\n7: "é" 日本 ☃'),
    ("A", "<b>."),
    ("ends:\n", "{query}"),
]


def rerank_template_of(folder: Path, architecture: str, tokenizer: Tokenizer) -> RerankTemplate | None:
    """The template that is laid down for the model, else what its folder was saved with, else None.

    Raises ``ModelLoadError`` for files that cannot be followed.
    """
    found = find_template(folder, architecture)
    template = found.bound(tokenizer) if found is not None else read_saved_cross_encoder(folder, tokenizer)
    if template is not None:
        tokenizer.control_tokens(template.text)  # which takes a second with thousands of them, so no request waits
    return template


def read_saved_cross_encoder(folder: Path, tokenizer: Tokenizer) -> RerankTemplate | None:
    """None for any other folder. ``ModelLoadError``, with the file's name, where it cannot be done as it says."""
    file = folder / "modules.json"
    modules = _optional(file)
    scores = [each for each in modules if str(each.get("type")).endswith(".LogitScore")] if modules else []
    if not scores:
        return None
    settings = _optional(folder / "config_sentence_transformers.json")
    config = _optional(folder / str(scores[0].get("path")) / "config.json")
    if not isinstance(config.get("true_token_id"), int):
        raise ModelLoadError(f"{file}: LogitScore's config names no true_token_id")
    inner = _optional(folder / "sentence_bert_config.json").get("processing_kwargs") or {}
    options = {key: value for key, value in (inner.get("chat_template") or {}).items() if key not in NOT_RENDERED}
    given = {"add_generation_prompt": False, **options}
    ids = [config["true_token_id"], config.get("false_token_id")]
    before, after, instruction = _pieces(folder, tokenizer, given, settings)
    return _separable(
        folder,
        tokenizer,
        RerankTemplate(
            name=f"{folder.name}'s own",
            before=(before,),
            document="{document}",
            after=(after,) if after else (),
            leading_special_tokens=False,
            labels=tuple(tokenizer.pieces([each for each in ids if each is not None])),
            instruction=instruction,
            label_ids=tuple(each for each in ids if each is not None),
            activation=_activation(folder, settings),
        ),
        given,
    )


def _pieces(
    folder: Path, tokenizer: Tokenizer, options: dict[str, Any], settings: dict[str, Any]
) -> tuple[str, str, str | None]:
    """What stands before and behind the document, with places, and the default of the instruction."""
    plain = _render(folder, tokenizer, QUERY, DOCUMENT, None, options)
    asked = _render(folder, tokenizer, QUERY, DOCUMENT, INSTRUCTION, options)
    default = (settings.get("prompts") or {}).get(settings.get("default_prompt_name") or "")
    rendered, instruction = plain, None
    if asked.count(INSTRUCTION) == 1:
        head, tail = asked.split(INSTRUCTION)
        if default is None and len(plain) > len(head) + len(tail) and plain.startswith(head) and plain.endswith(tail):
            default = plain[len(head) : len(plain) - len(tail)]
        if default:
            rendered, instruction = asked, default
    if rendered.count(QUERY) != 1 or rendered.count(DOCUMENT) != 1 or rendered.index(DOCUMENT) < rendered.index(QUERY):
        raise ModelLoadError(f"{folder}: the chat template does not write the query and then the document, each once")
    places = rendered.replace(QUERY, "{query}").replace(INSTRUCTION, "{instruction}")
    before, after = places.split(DOCUMENT)
    return before, after, instruction


def _separable(folder: Path, tokenizer: Tokenizer, whole: RerankTemplate, options: dict[str, Any]) -> RerankTemplate:
    """The template cut where the tokenizer begins a new token whatever the texts are, as probes show."""
    (before,) = whole.before
    tail = before[before.rindex("{query}") + len("{query}") :]
    for length in (len(tail) - 1 - tail.rfind("\n"), 0, len(tail)):
        kept = before[: len(before) - length]
        template = replace(whole, before=(kept,), document=before[len(before) - length :] + "{document}")
        if all(_agrees(folder, tokenizer, template, options, *probe) for probe in PROBES):
            return template
    problem = "changes texts, or the tokenizer joins the document with what stands around it"
    raise ModelLoadError(f"{folder}: the chat template {problem}")


def _agrees(
    folder: Path, tokenizer: Tokenizer, template: RerankTemplate, options: dict[str, Any], query: str, document: str
) -> bool:
    values = {"query": query, "document": document, "instruction": template.instruction or ""}
    pieces = [fill(piece, values) for piece in (*template.before, template.document, *template.after)]
    own = [token_id for ids in tokenizer.encode_batch(pieces, special_tokens=False) for token_id in ids]
    rendered = _render(folder, tokenizer, query, document, template.instruction, options)
    return own == tokenizer.encode(rendered, special_tokens=False)


def _render(
    folder: Path, tokenizer: Tokenizer, query: str, document: str, instruction: str | None, options: dict[str, Any]
) -> str:
    messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
    if instruction is not None:
        messages.insert(0, {"role": "system", "content": instruction})
    try:
        return tokenizer.render_chat(messages, **options)
    except (CapabilityMissing, InvalidField) as error:
        raise ModelLoadError(f"{folder}: a query and a document cannot be put together: {error.message}") from error


def _activation(folder: Path, settings: dict[str, Any]) -> str:
    named = str(settings.get("activation_fn") or "torch.nn.modules.activation.Sigmoid")
    own = ACTIVATIONS.get(named.rsplit(".", 1)[-1])
    if own is None or not named.startswith("torch.nn."):
        file = folder / "config_sentence_transformers.json"
        raise ModelLoadError(f"{file}: activation_fn {named} is not served here; served: {sorted(ACTIVATIONS)}")
    return own


def _optional(file: Path) -> Any:
    if not file.is_file():
        return {}
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{file}: {error}") from error
