"""Schemas said with fewer keywords: for every value of the public suite the same, as the package jsonschema judges."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from pyruntime.constraints.schema import JsonSchema
from pyruntime.errors import InvalidField

LATEST = jsonschema.Draft202012Validator
DRAFTS = {"draft2020-12": LATEST, "draft7": jsonschema.Draft7Validator}


def suite() -> dict[str, list[dict]]:
    """Cases by draft."""
    spec = find_spec("asdf")
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parent / "_jsonschema" / "json" / "tests"
    return {
        name: [case for file in sorted((root / name).glob("*.json")) for case in json.loads(file.read_text("utf-8"))]
        for name in DRAFTS
    }


CASES = suite()
VALUES = {json.dumps(test["data"]): test["data"] for case in CASES["draft2020-12"] for test in case["tests"]}


def simpler(schema: Any) -> Any | None:
    """The second form, None when there is no other."""
    forms = list(JsonSchema("constraint.json_schema", json.dumps(schema)).forms())
    return json.loads(forms[1]) if len(forms) > 1 else None


def verdict(validator: Any, value: Any) -> bool | str:
    try:
        return bool(validator.is_valid(value))
    except Exception as error:  # of references that lead nowhere
        return type(error).__name__


@pytest.mark.parametrize("draft", DRAFTS)
def test_what_conforms_to_one_form_conforms_to_the_other(draft):
    counts: Counter[bool] = Counter()
    for case in CASES[draft]:
        schema = case["schema"]
        if not isinstance(schema, dict) or any(word in json.dumps(schema) for word in ("unevaluated", "dynamic")):
            continue  # jsonschema itself is wrong about some of these
        schema = {"$schema": DRAFTS[draft].META_SCHEMA["$schema"]} | schema
        try:
            form = simpler(schema)
        except InvalidField:
            continue
        if form is None:
            continue
        DRAFTS[draft].check_schema(form)
        before, after = DRAFTS[draft](schema), DRAFTS[draft](form)
        for value in [*(test["data"] for test in case["tests"]), *itertools.islice(VALUES.values(), 0, None, 40)]:
            first, second = verdict(before, value), verdict(after, value)
            if isinstance(first, str) or isinstance(second, str):
                continue  # refused by the library for the same reference
            assert first == second, (case["description"], value, form)
            counts[first] += 1
    assert min(counts[True], counts[False]) > 200


def properties(kind: str, **others: Any) -> dict:
    return {"properties": {"kind": {"const": kind}} | others, "required": ["kind"]}


# (schema, a keyword that is gone)
SAID = [
    ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, "oneOf"),
    ({"oneOf": [properties("x", n={"maximum": 2}), properties("y"), {"type": "string"}]}, "oneOf"),
    ({"oneOf": [{"enum": ["ab", "ac", "", 1]}, {"enum": ["ac", "b", 2.5, None, True]}]}, "oneOf"),
    ({"oneOf": [{"$ref": "#/$defs/s"}, {"minLength": 2}], "$defs": {"s": {"type": "string", "maxLength": 3}}}, "oneOf"),
    ({"if": properties("x"), "then": {"required": ["n"]}, "else": {"required": ["m"]}}, "if"),
    ({"if": {"minimum": 2}, "then": {"multipleOf": 2}}, "if"),
    ({"not": {"enum": ["a.b", "a", "]^-"]}, "type": "string"}, "not"),
    ({"not": {"anyOf": [{"type": "array"}, {"minimum": 1, "maximum": 2}]}}, "not"),
    ({"not": {"properties": {"n": {"type": "string"}}}}, "not"),
    ({"dependentRequired": {"n": ["m"]}}, "dependentRequired"),
    ({"dependentSchemas": {"n": {"required": ["m"]}, "m": False}}, "dependentSchemas"),
    ({"propertyNames": {"pattern": "^[nm]"}}, "propertyNames"),
    ({"propertyNames": {"maxLength": 1}}, "propertyNames"),
    ({"propertyNames": {"enum": ["n", "k.", "kind"]}}, "propertyNames"),
    ({"propertyNames": False}, "propertyNames"),
    ({"type": "array", "maxItems": 1, "uniqueItems": True}, "uniqueItems"),
    ({"contains": True}, "contains"),
    ({"type": "string", "format": "file-path", "minLength": 2}, "format"),
    ({"not": {"format": "int64"}}, "format"),
    ({"properties": {"n": True}, "unevaluatedProperties": False}, "unevaluatedProperties"),
    (
        {
            "allOf": [{"$ref": "#/$defs/base"}, {"patternProperties": {"^k": True}}],
            "properties": {"n": {"type": "integer"}},
            "unevaluatedProperties": {"const": "x"},
            "$defs": {"base": {"required": ["m"], "properties": {"m": {"const": 1}}}},
        },
        "unevaluatedProperties",
    ),
    ({"allOf": [{"prefixItems": [{"const": 1}]}], "unevaluatedItems": False}, "unevaluatedItems"),
    ({"prefixItems": [{"type": "integer"}], "unevaluatedItems": {"type": "string"}}, "unevaluatedItems"),
]
OBJECTS = [
    dict(zip(names, values, strict=True))
    for size in range(4)
    for names in itertools.combinations(["kind", "n", "m", "a", "b", "k.", "kx"], size)
    for values in itertools.product(["x", "y", 1, 3], repeat=size)
]
SCALARS = [
    None,
    True,
    False,
    *range(-1, 5),
    1.0,
    2.5,
    "",
    "a",
    "ab",
    "ac",
    "abc",
    "abcd",
    "b",
    "a.b",
    "axb",
    "]",
    "]^-",
]
LISTS = [[], [1], [1, 1], ["a"], [1, "a"], [1, 2]]


@pytest.mark.parametrize(("schema", "keyword"), SAID, ids=[json.dumps(schema)[:60] for schema, _ in SAID])
def test_keywords_are_said_in_others(schema, keyword):
    form = simpler(schema)
    assert f'"{keyword}"' not in json.dumps(form)
    before, after = LATEST(schema), LATEST(form)
    for value in [*OBJECTS, *SCALARS, *LISTS]:
        assert before.is_valid(value) == after.is_valid(value), value


UNSAID = [
    {"not": {"type": "integer"}},
    {"not": {"pattern": "a"}},
    {"oneOf": [{"multipleOf": 3}, {"multipleOf": 5}]},
    {"uniqueItems": True},
    {"contains": {"type": "integer"}},
    {"anyOf": [{"properties": {"a": True}}], "unevaluatedProperties": False},
    {"allOf": [{"$ref": "#"}], "properties": {"a": True}, "unevaluatedProperties": False},
    {"oneOf": [{"$ref": "#"}, {"$ref": "#"}]},
    {"dependentRequired": [1]},
    {"$schema": "http://json-schema.org/draft-04/schema#", "not": {"type": "string"}},
]


@pytest.mark.parametrize("schema", UNSAID, ids=json.dumps)
def test_what_cannot_be_said_exactly_stays_as_it_is(schema):
    assert simpler(schema) is None


def test_negations_that_grow_without_bound_are_given_up():
    many = {"oneOf": [{"anyOf": [{"const": f"{i} {j}"} for j in range(20)]} for i in range(100)]}
    assert simpler({"oneOf": [many] * 20}) is None


@pytest.mark.parametrize("least", [2, 3.0])
def test_counted_names_that_may_be_one_twice_are_refused(least):
    with pytest.raises(InvalidField, match="minProperties"):
        simpler({"properties": {"a": {"minProperties": least, "required": ["b"]}}})
    assert simpler({"minProperties": 2, "required": ["a", "b"]}) is None


@pytest.mark.parametrize("name", ["email", "json-pointer", "regex"])
def test_formats_of_the_standard_are_left_to_the_library(name):
    """Which knows one of these, and refuses the others."""
    schema = {"type": "string", "format": name, "properties": {"format": {"format": "x"}}}
    assert simpler(schema) == schema | {"properties": {"format": {}}}
