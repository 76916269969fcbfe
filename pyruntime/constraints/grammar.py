"""A constraint's text in the form that llguidance compiles, and the limits of what it may cost."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher, LLParserLimits
from llguidance.gbnf_to_lark import gbnf_to_lark

from pyruntime.constraints.schema import JsonSchema
from pyruntime.errors import InvalidField

# Bytes of one constraint's text, options of a choice together.
MAX_CONSTRAINT_BYTES = 64 * 1024

# JSON: white space between tokens is bounded, since a model may go on with it forever. Options that a schema names
# itself in `x-guidance` are overridden, but for white space at all: they would let values through that do not conform.
JSON_OPTIONS = {
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_flexible": True,
    "whitespace_pattern": r"[ \n\t\r]{1,32}",
    "coerce_one_of": False,
    "lenient": False,
    "json_allowed_escapes": 'nrbtf\\"u',
    "json_allow_general_unicode_escapes": False,
}
COMPACT_OPTIONS = {name: value for name, value in JSON_OPTIONS.items() if name != "whitespace_pattern"} | {
    "whitespace_flexible": False
}

# A rule of Lark that a grammar must have, and a rule of GBNF, the notation of llama.cpp and xgrammar.
_LARK_START = re.compile(r"(?m)^\s*[?!]?start\b[^\n:]*:(?!:=)")
_GBNF_RULE = re.compile(r"(?m)^\s*[\w-]+\s*::=")

MOST_SHOWN = 200

NOT_TO_BE_FOLLOWED = "no text conforms to it, or it is too costly to follow"


@dataclass(frozen=True, slots=True)
class ConstraintText:
    """``kind``: json_schema, regex, grammar or choice. ``texts``: the one text, or a choice's options."""

    kind: str
    texts: tuple[str, ...]

    @property
    def field(self) -> str:
        return f"constraint.{self.kind}" + (".options" if self.kind == "choice" else "")


def limits() -> LLParserLimits:
    """What a constraint may cost, in the library's own units, so that the answer does not depend on the machine.

    One mask of a hostile grammar takes up to 20 ms with them, and one of a schema a hundredth of it. A state of the
    lexer takes 0.1 to 1 kB; a text of 5,000 characters whose length is bounded goes through 15,000 of them.
    """
    return LLParserLimits(
        initial_lexer_fuel=500_000,
        step_lexer_fuel=100_000,
        step_max_items=10_000,
        max_items_in_row=1_500,
        max_lexer_states=50_000,
        max_grammar_size=100_000,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )


def check_size(text: ConstraintText) -> None:
    size = sum(len(each.encode()) for each in text.texts)
    if size > MAX_CONSTRAINT_BYTES:
        raise InvalidField(text.field, f"has {size} bytes; allowed: at most {MAX_CONSTRAINT_BYTES}")


def grammars_of(text: ConstraintText) -> Iterator[str]:
    """The library's grammars for it; each says the same, and a later one is for when the one before is refused.

    Raises ``InvalidField``. Belongs into the process that checks: a hostile text may take long here too.
    """
    only = text.texts[0]
    if text.kind == "regex":
        yield LLMatcher.grammar_from_regex(only)
    elif text.kind == "grammar":
        yield LLMatcher.grammar_from_lark(_lark(text.field, only))
    elif text.kind == "choice":  # a terminal, whose options are followed together
        yield LLMatcher.grammar_from_lark("start: C\nC: " + " | ".join(json.dumps(each) for each in text.texts))
    else:
        schema = JsonSchema(text.field, only)
        options = COMPACT_OPTIONS if schema.is_compact else JSON_OPTIONS
        for form in schema.forms():
            yield _json_grammar(text.field, form, options)


def _json_grammar(field: str, schema: str, options: dict[str, Any]) -> str:
    try:
        return LLMatcher.grammar_from_json_schema(schema, overrides=options)  # type: ignore[arg-type]
    except ValueError as error:
        raise InvalidField(field, f"is no JSON schema: {shorten(str(error))}") from error


def _lark(field: str, grammar: str) -> str:
    if "allow_invalid_utf8" in grammar:
        raise InvalidField(field, "has the option allow_invalid_utf8; allowed: grammars of text")
    if grammar.lstrip().startswith("{"):
        raise InvalidField(field, "begins with {; allowed: rules in the notation of Lark or GBNF, one of them `start`")
    if _LARK_START.search(grammar) or not _GBNF_RULE.search(grammar):
        return grammar
    try:
        return str(gbnf_to_lark(grammar))
    except Exception as error:  # a parser without an error type of its own
        raise InvalidField(field, f"does not compile: GBNF: {shorten(str(error) or type(error).__name__)}") from error


def shorten(problem: str) -> str:
    """The library's message on one line of bounded length."""
    line = re.sub(r"\s+", " ", problem.replace("<non-verbose/>", "")).strip()
    return line if len(line) <= MOST_SHOWN else line[: MOST_SHOWN - 3] + "..."
