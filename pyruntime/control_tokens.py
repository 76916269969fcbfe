"""What is put into a template stays text: control tokens come from the template alone.

A tokenizer reads the name of a special token anywhere in a text as that token, so that a message which spells the ends
and beginnings of turns would speak for others, and a document for its judge. Here such names are put between two marks
before the template sees them, and are spelled out when the rendered text is encoded. Texts without such a name are
rendered and encoded as ever. The idea, and which tokens those are, is of transformers' ``sanitize_control_tokens``,
which changes the tokenizer while it encodes and so cannot be called from several threads.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Backend

from pyruntime.errors import InvalidField

# Unicode's code points for a program's own use inside; a text that holds some gets others as its marks.
_MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
# What may be done about a name that cannot be spelled in other tokens.
_ALLOWED = "texts without it"
# What a model answers is said by it again as it was: tokens that its texts show, as `<think>`, are read as tokens.
_OWN_ROLES = ("assistant", "model")
# Text that stands before a piece while it is encoded, since some tokenizers put a space before a text's beginning.
_ANCHORS = "\n", "a", "."


@dataclass(frozen=True)
class MarkedText:
    """A rendered template, each name of a control token that is no token between ``marks``; empty: there is none."""

    text: str
    marks: str = ""

    @property
    def plain(self) -> str:
        return re.sub(f"[{self.marks}]", "", self.text) if self.marks else self.text


class ControlTokens:
    """The control tokens of one tokenizer and one template.

    They are the special tokens, and the added ones that the template writes, as `<tool_response>`.
    """

    def __init__(self, backend: Any, template: str) -> None:
        added = {i: token for i, token in sorted(backend.get_added_tokens_decoder().items()) if token.content}
        self._special = {token.content for token in added.values() if token.special}
        shown = {token.content for token in added.values() if token.content in template}
        self._all = self._special | {name for name in shown if not name.isspace()}
        self._finder = _finder(backend, list(added.values()))
        self._found = {i: token.content for i, token in self._finder.get_added_tokens_decoder().items()}
        self._backend = backend
        unknown = set(self._encode([_MARKS[0]])[0])
        self._ids = {i for i, token in added.items() if token.content in self._all} - unknown

    def mark(self, messages: list[dict[str, Any]], options: dict[str, Any]) -> tuple[Any, Any, str]:
        """Messages and options with the names in their texts marked, and the marks; as they are, and no marks, if none.

        Raises ``InvalidField`` of the field ``chat`` for texts that use up the marks.
        """
        said = [(message, self._names_for(message.get("role"))) for message in messages]
        texts = [text for each in (messages, options) for text in _texts(each)]
        if not any(self._spans(text, self._all) for text in texts):
            return messages, options, ""
        unused = [mark for mark in _MARKS if not any(mark in text for text in texts)]
        if len(unused) < 2:
            raise InvalidField("chat", "holds all of U+FDD0 to U+FDEF; allowed: texts that leave two of them out")
        marks = "".join(islice(unused, 2))
        marked = []
        for message, names in said:
            own = {"content": self._marked(message.get("content"), marks, names)}
            marked.append({**self._marked(message, marks, self._all), **own})
        return marked, self._marked(options, marks, self._all), marks

    def mark_values(self, values: dict[str, str]) -> tuple[dict[str, str], str]:
        """As ``mark``, of texts alone."""
        _, marked, marks = self.mark([], values)
        return marked, marks

    def encode_behind(self, prompt: str, texts: list[str]) -> list[list[int] | InvalidField]:
        """Token ids of each text behind ``prompt``, whose names alone are control tokens; or what ``ids`` raises."""
        encoded = zip(texts, self._encode([prompt + text for text in texts]), strict=True)
        return [ids if self._ids.isdisjoint(ids) else self._spelled_behind(prompt, text) for text, ids in encoded]

    def _spelled_behind(self, prompt: str, text: str) -> list[int] | InvalidField:
        try:
            values, marks = self.mark_values({"text": text})
            return self.ids(MarkedText(prompt + values["text"], marks))
        except InvalidField as error:
            return error

    def ids(self, rendered: MarkedText, allowed: str = _ALLOWED) -> list[int]:
        """Token ids of the text. Raises ``InvalidField`` for a name that cannot be spelled in other tokens.

        ``allowed``: what the error says is.
        """
        if not rendered.marks:
            return self._encode([rendered.text])[0]
        first, *others = self._pieces(rendered.text, rendered.marks[0], rendered.marks[1])
        texts = [piece for piece, is_name in others if not is_name]
        names = sorted({piece for piece, is_name in others if is_name})
        texts_ids = iter(self._behind(texts))
        names_ids = {name: self._spelled(name, allowed) for name in names}
        (found,) = self._encode([first[0]])
        for piece, is_name in others:
            found += names_ids[piece] if is_name else next(texts_ids)
        return found

    def _encode(self, texts: list[str]) -> list[list[int]]:
        return [found.ids for found in self._backend.encode_batch_fast(texts, add_special_tokens=False)]

    def _names_for(self, role: Any) -> set[str]:
        return self._special if role in _OWN_ROLES else self._all

    def _spans(self, text: str, names: set[str]) -> list[tuple[int, int]]:
        found = self._finder.encode(text, add_special_tokens=False)
        # By the name, not by the text that was found: some tokens take spaces along, or any case.
        each = zip(found.ids, found.offsets, strict=True)
        return [span for token_id, span in each if self._found[token_id] in names]

    def _marked(self, value: Any, marks: str, names: set[str]) -> Any:
        if isinstance(value, dict):
            return {self._marked(key, marks, names): self._marked(each, marks, names) for key, each in value.items()}
        if isinstance(value, list):
            return [self._marked(each, marks, names) for each in value]
        if not isinstance(value, str):
            return value
        parts, done = [], 0
        for start, end in self._spans(value, names):
            parts += [value[done:start], marks[0], value[start:end], marks[1]]
            done = end
        return "".join([*parts, value[done:]])

    def _pieces(self, text: str, start: str, end: str) -> list[tuple[str, bool]]:
        """The text's parts, and of each whether it is a marked name. The first is text, perhaps empty.

        A template that takes a text apart may leave one mark alone: the text is divided there all the same, so that
        its two sides cannot become a name together.
        """
        pieces, done = [], 0
        for found in re.finditer(f"{start}([^{start}{end}]*){end}|[{start}{end}]", text):
            pieces.append((text[done : found.start()], False))
            done = found.end()
            if found[1] is not None:
                is_name = found[1] in self._all or self._spans(found[1], self._all) == [(0, len(found[1]))]
                pieces.append((found[1], is_name))
        first, *others = [*pieces, (text[done:], False)]
        return [first, *((piece, is_name) for piece, is_name in others if piece)]

    def _spelled(self, name: str, allowed: str) -> list[int]:
        """A name in other tokens: it is cut where neither half is one."""
        for place in range(1, len(name)):
            halves = self._behind([name[:place], name[place:]])
            if self._ids.isdisjoint(halves[0] + halves[1]):
                return halves[0] + halves[1]
        problem = f"spells the token {name!r}, which the tokenizer cannot read as text"
        raise InvalidField("chat", f"{problem}; allowed: {allowed}")

    def _behind(self, pieces: list[str]) -> list[list[int]]:
        """Ids of each piece as it is read behind other text."""
        found: dict[int, list[int]] = {}
        for anchor in _ANCHORS:
            left = [place for place in range(len(pieces)) if place not in found]
            before, *those = self._encode([anchor, *(anchor + pieces[place] for place in left)])
            for place, ids in zip(left, those, strict=True):
                if ids[: len(before)] == before:
                    found[place] = ids[len(before) :]
        left = [place for place in range(len(pieces)) if place not in found]
        found |= dict(zip(left, self._encode([pieces[place] for place in left]), strict=True))
        return [found[place] for place in range(len(pieces))]


def _finder(backend: Any, added: list[AddedToken]) -> Any:
    """A tokenizer of added tokens alone, which finds them in a text as ``backend`` does."""
    finder = Backend(models.BPE())
    if any(token.normalized for token in added):
        finder.normalizer = backend.normalizer
    finder.add_tokens(added)
    return finder


def _texts(value: Any) -> Iterator[str]:
    """All texts in a value as of JSON, keys too."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, dict):
            waiting += [*each.keys(), *each.values()]
        elif isinstance(each, list):
            waiting += each
