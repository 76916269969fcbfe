"""`unevaluatedProperties` and `unevaluatedItems` said as `additionalProperties` and `items`, where what is evaluated is
the same for all values: by the schema's own keywords, and by those of `allOf` and of references."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

# What evaluates for some values and not for others, or in ways that are not followed here.
_DEPENDS = {"anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas", "contains"}
_DEPENDS |= {"$dynamicRef", "$recursiveRef", "$id"}
_UNEVALUATED = {"unevaluatedProperties", "unevaluatedItems"}
MOST_PARTS = 200


@dataclass
class _Evaluated:
    """``all_names`` and ``all_items``: whether there is nothing left to be unevaluated."""

    names: dict[str, bool] = field(default_factory=dict)
    patterns: dict[str, bool] = field(default_factory=dict)
    num_items: int = 0
    all_names: bool = False
    all_items: bool = False
    num_parts: int = 0


def say_as_additional(schema: dict[str, Any], draft: int, target: Callable[[str], Any]) -> None:
    """Change ``schema`` in place. ``target``: the schema that a reference leads to, None when that is not known."""
    if draft < 2019:
        return
    for key in _UNEVALUATED & schema.keys():
        if schema[key] is True or schema[key] == {}:
            del schema[key]
    if not _UNEVALUATED & schema.keys():
        return
    found = _Evaluated()
    if not _collect(schema, found, target, is_top=True):
        return
    more: dict[str, Any] = {}
    if "unevaluatedProperties" in schema:
        value = schema.pop("unevaluatedProperties")
        if not found.all_names:
            more |= {"properties": found.names, "patternProperties": found.patterns, "additionalProperties": value}
    if "unevaluatedItems" in schema and draft > 2019:  # before, `items` itself was something else
        value = schema.pop("unevaluatedItems")
        if not found.all_items:
            more |= {"prefixItems": [True] * found.num_items} if found.num_items else {}
            more["items"] = value
    if more:
        schema["allOf"] = [*schema.get("allOf", []), {key: value for key, value in more.items() if value != {}}]


def _collect(schema: Any, found: _Evaluated, target: Callable[[str], Any], is_top: bool = False) -> bool:
    """Add what ``schema`` evaluates; False when that depends on the value."""
    found.num_parts += 1
    if isinstance(schema, bool):
        return True
    if not isinstance(schema, dict) or found.num_parts > MOST_PARTS:
        return False
    if _DEPENDS & schema.keys() or (not is_top and _UNEVALUATED & schema.keys()):
        return False
    found.names |= dict.fromkeys(schema.get("properties", {}), True)
    found.patterns |= dict.fromkeys(schema.get("patternProperties", {}), True)
    found.all_names |= "additionalProperties" in schema
    found.all_items |= "items" in schema
    found.num_items = max(found.num_items, len(schema.get("prefixItems", [])))
    parts = list(schema.get("allOf", []))
    if "$ref" in schema:
        parts.append(target(schema["$ref"]))
    return all(_collect(part, found, target) for part in parts)
