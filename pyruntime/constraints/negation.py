"""The schema that holds where another one does not, for those of which that can be said without `not`."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

_TYPES = ("null", "boolean", "object", "array", "number", "string")
# Keywords that say nothing about the value.
_ANNOTATIONS = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"}
_ANNOTATIONS |= {"$schema", "$defs", "definitions"}

MOST_SCHEMAS = 20_000
MOST_REFERENCES = 32
_ANY = r"[\s\S]"
_META = r"\.+*?()|[]{}^$#&-~"


class TooLarge(Exception):
    """The negations of a document have more parts than are worth it."""


class Negation:
    """Of schemas in one document; ``draft`` as a number, 6 or later."""

    def __init__(self, root: dict[str, Any], draft: int) -> None:
        self._root, self._draft = root, draft
        self._num_made = 0
        self._depth = 0

    def of(self, schema: Any) -> Any | None:
        """The schema of all values that do not conform; None when that cannot be said."""
        self._num_made += 1
        if self._num_made > MOST_SCHEMAS:
            raise TooLarge
        if isinstance(schema, bool):
            return not schema
        if not isinstance(schema, dict):
            return None
        parts: list[Any] = []
        for key, value in schema.items():
            if key in _ANNOTATIONS:
                continue
            rule = self._rules().get(key)
            if rule is None or ("$ref" in schema and len(schema.keys() - _ANNOTATIONS) > 1 and self._draft <= 7):
                return None
            part = rule(value)
            if part is None:
                return None
            parts.append(part)
        return either(parts)

    def _rules(self) -> dict[str, Callable[[Any], Any]]:
        rules: dict[str, Callable[[Any], Any]] = {
            "type": _type,
            "const": lambda value: _values([value]),
            "enum": lambda values: _values(values) if isinstance(values, list) else None,
            "required": _required,
            "properties": self._properties,
            "allOf": lambda members: self._each(members, either),
            "anyOf": lambda members: self._each(members, both),
            "not": lambda value: value,
            "$ref": self._reference,
            "minimum": lambda m: {"type": "number", "exclusiveMaximum": m},
            "maximum": lambda m: {"type": "number", "exclusiveMinimum": m},
            "exclusiveMinimum": lambda m: {"type": "number", "maximum": m},
            "exclusiveMaximum": lambda m: {"type": "number", "minimum": m},
            "minLength": lambda n: _fewer("string", "maxLength", n),
            "maxLength": lambda n: _more("string", "minLength", n),
            "minItems": lambda n: _fewer("array", "maxItems", n),
            "maxItems": lambda n: _more("array", "minItems", n),
        }
        return rules

    def _each(self, members: Any, joined: Callable[[list[Any]], Any]) -> Any | None:
        if not isinstance(members, list):
            return None
        negated = [self.of(member) for member in members]
        return None if None in negated else joined(negated)

    def _properties(self, properties: Any) -> Any | None:
        """One of them is there and wrong."""
        if not isinstance(properties, dict):
            return None
        wrong = []
        for name, schema in properties.items():
            negated = self.of(schema)
            if negated is None:
                return None
            if negated is not False:
                wrong.append({"type": "object", "properties": {name: negated}, "required": [name]})
        return either(wrong)

    def _reference(self, pointer: Any) -> Any | None:
        found = self.target(pointer)
        if found is None or self._depth >= MOST_REFERENCES:
            return None
        self._depth += 1
        negated = self.of(found)
        self._depth -= 1
        return negated

    def target(self, pointer: Any) -> Any | None:
        """The schema in the document itself that a reference leads to, when no `$id` can mean another one."""
        if not isinstance(pointer, str) or not (pointer == "#" or pointer.startswith("#/")) or "%" in pointer:
            return None
        if _has_id(self._root):
            return None
        found: Any = self._root
        for part in pointer[1:].split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, dict) or name not in found:
                return None
            found = found[name]
        return found

    def pattern_of(self, schema: Any) -> str | None:
        """The pattern that a string matches just when it conforms, for patterns, lengths and lists of strings."""
        if not isinstance(schema, dict):
            return None
        said = {key: value for key, value in schema.items() if key not in _ANNOTATIONS}
        if said.get("type") == "string":
            del said["type"]
        if said.keys() == {"pattern"} and isinstance(said["pattern"], str):
            return said["pattern"]
        if said and said.keys() <= {"minLength", "maxLength"} and all(isinstance(n, int) for n in said.values()):
            return f"^{_ANY}{{{said.get('minLength', 0)},{said.get('maxLength', '')}}}$"
        values = [said["const"]] if said.keys() == {"const"} else said.get("enum") if said.keys() == {"enum"} else None
        words = [each for each in values if isinstance(each, str)] if isinstance(values, list) else []
        return f"^(?:{'|'.join(map(_literal, words))})$" if words else None


def either(members: list[Any]) -> Any:
    kept = [each for each in members if each is not False]
    if True in [each for each in kept if isinstance(each, bool)]:
        return True
    return kept[0] if len(kept) == 1 else {"anyOf": kept} if kept else False


def both(members: list[Any]) -> Any:
    kept = [each for each in members if each is not True]
    if False in [each for each in kept if isinstance(each, bool)]:
        return False
    return kept[0] if len(kept) == 1 else {"allOf": kept} if kept else True


def _has_id(schema: Any) -> bool:
    if isinstance(schema, list):
        return any(map(_has_id, schema))
    if isinstance(schema, dict):
        return "$id" in schema or any(map(_has_id, schema.values()))
    return False


def _type(given: Any) -> Any | None:
    types = given if isinstance(given, list) else [given]
    if "integer" in types and "number" not in types:  # numbers that are no integers cannot be named
        return None
    left = [each for each in _TYPES if each not in types]
    return {"type": left} if left else False


def _required(names: Any) -> Any | None:
    if not isinstance(names, list):
        return None
    return either([{"type": "object", "properties": {str(name): False}} for name in names])


def _fewer(kind: str, keyword: str, count: Any) -> Any | None:
    if not isinstance(count, int):
        return None
    return {"type": kind, keyword: count - 1} if count > 0 else False


def _more(kind: str, keyword: str, count: Any) -> Any | None:
    return {"type": kind, keyword: count + 1} if isinstance(count, int) else None


def _values(values: list[Any]) -> Any | None:
    """Everything but some nulls, booleans, numbers and strings."""
    if any(isinstance(each, dict | list) for each in values):
        return None
    strings = [each for each in values if isinstance(each, str)]
    booleans = [each for each in values if isinstance(each, bool)]
    numbers = sorted({each for each in values if isinstance(each, int | float) and not isinstance(each, bool)})
    named = {"null"} if None in values else set()
    named |= {"string"} if strings else set()
    named |= {"boolean"} if booleans else set()
    named |= {"number"} if numbers else set()
    parts: list[Any] = [{"type": [each for each in _TYPES if each not in named]}]
    if len(set(booleans)) == 1:
        parts.append({"const": not booleans[0]})
    if strings:
        parts.append({"type": "string", "pattern": f"^{_other_than(sorted(set(strings)))}$"})
    if numbers:
        parts.append({"type": "number", "exclusiveMaximum": numbers[0]})
        parts += [
            {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high} for low, high in pairwise(numbers)
        ]
        parts.append({"type": "number", "exclusiveMinimum": numbers[-1]})
    return either(parts)


def _other_than(words: list[str]) -> str:
    """A pattern of all strings but ``words``, ascending: at some place they go another way, or end."""
    starts = sorted({word[0] for word in words if word})
    ways = [f"[^{''.join(map(_in_class, starts))}]{_ANY}*" if starts else f"{_ANY}+"]
    for start in starts:
        ways.append(_literal(start) + _other_than([word[1:] for word in words if word[:1] == start]))
    return f"(?:{'|'.join(ways)})" + ("" if "" in words else "?")


def _literal(text: str) -> str:
    return "".join("\\" + each if each in _META else each for each in text)


def _in_class(character: str) -> str:
    return "\\" + character if character in r"\]^-[&~" else character
