"""A constraint's text in the form that llguidance compiles, and the limits of what it may cost."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from llguidance import LLMatcher, LLParserLimits

from pyruntime.errors import InvalidField

# Bytes of one constraint's text, options of a choice together.
MAX_CONSTRAINT_BYTES = 64 * 1024

# JSON: white space between tokens is bounded, since a model may go on with it forever. Options that a schema names
# itself in `x-guidance` are overridden: they would let values through that do not conform.
JSON_OPTIONS = {
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_flexible": True,
    "whitespace_pattern": r"[ \n\t\r]{1,32}",
    "coerce_one_of": False,
    "lenient": False,
}

MOST_SHOWN = 200


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

    Lexer states take 1 to 2 kB each. The library's authors count 14,000 units of a step's fuel and 20,000 items to a
    millisecond, so that no step waits longer than about ten for one row.
    """
    return LLParserLimits(
        initial_lexer_fuel=500_000,
        step_lexer_fuel=100_000,
        step_max_items=30_000,
        max_items_in_row=1_000,
        max_lexer_states=10_000,
        max_grammar_size=100_000,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )


def grammar_of(text: ConstraintText) -> str:
    """The library's grammar. Raises ``InvalidField`` for texts that are too long or no JSON."""
    size = sum(len(each.encode()) for each in text.texts)
    if size > MAX_CONSTRAINT_BYTES:
        raise InvalidField(text.field, f"has {size} bytes; allowed: at most {MAX_CONSTRAINT_BYTES}")
    only = text.texts[0]
    if text.kind == "regex":
        return LLMatcher.grammar_from_regex(only)
    if text.kind == "grammar":
        return LLMatcher.grammar_from_lark(only)
    if text.kind == "choice":
        return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(each) for each in text.texts))
    if only.strip() == "true":  # conforms to anything, and the options need an object
        only = "{}"
    try:
        return LLMatcher.grammar_from_json_schema(only, overrides=JSON_OPTIONS)  # type: ignore[arg-type]
    except ValueError as error:
        raise InvalidField(text.field, f"is no JSON schema: {shorten(str(error))}") from error


def shorten(problem: str) -> str:
    """The library's message on one line of bounded length."""
    line = re.sub(r"\s+", " ", problem).strip()
    return line if len(line) <= MOST_SHOWN else line[: MOST_SHOWN - 3] + "..."
