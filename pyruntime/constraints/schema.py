"""JSON schemas, and the same said with fewer keywords where the library does not know one.

Every rewriting here is exact: what conforms to one form conforms to the other. What cannot be said exactly is left as
it is, and the library then refuses it. Members are only added to `allOf`, at its end, so that a reference into the
schema finds what it found before, or nothing.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

from pyruntime.constraints.evaluated import say_as_additional
from pyruntime.constraints.negation import Negation, TooLarge
from pyruntime.errors import InvalidField

_OLD = {"draft-06": 6, "draft-07": 7}
_LATEST = 2020
# Where a schema has schemas in it.
_ONE = ("additionalProperties", "additionalItems", "items", "contains", "propertyNames", "not", "if", "then", "else")
_ONE_LATER = ("unevaluatedProperties", "unevaluatedItems")
_LIST = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
_COUNTS = ("maxItems", "minItems", "maxLength", "minLength", "maxProperties", "minProperties")
# Others are of who reads the schema, and by the standard let everything through.
_FORMATS = frozenset(
    "date-time date time duration email idn-email hostname idn-hostname ipv4 ipv6 uri uri-reference iri iri-reference"
    " uuid uri-template json-pointer relative-json-pointer regex".split()
)
# What a schema that is not well formed, or very large, makes of the rules below: the library is left to say why.
_NOT_WORTH_IT = (TooLarge, RecursionError, AttributeError, KeyError, TypeError, ValueError)


class JsonSchema:
    """The schema of one constraint. Raises ``InvalidField`` naming ``field`` for a text that is none."""

    def __init__(self, field: str, text: str) -> None:
        self._field, self._text = field, text
        try:
            self._schema = json.loads(text, parse_constant=_no_constant)
        except RecursionError as error:
            raise InvalidField(field, "is no JSON schema: nested too deeply") from error
        except ValueError as error:
            raise InvalidField(field, f"is no JSON schema: {error}") from error
        if not isinstance(self._schema, dict | bool):
            problem = f"is no JSON schema: a schema is an object, true or false, not {type(self._schema).__name__}"
            raise InvalidField(field, problem)
        if self._schema is False:
            raise InvalidField(field, "is false: no text conforms to it")

    @property
    def is_compact(self) -> bool:
        """Whether its own options want no white space between tokens."""
        options = self._schema.get("x-guidance") if isinstance(self._schema, dict) else None
        return isinstance(options, dict) and options.get("whitespace_flexible") is False

    def forms(self) -> Iterator[str]:
        """The schema as it stands, and then, if it differs, without keywords that can be said in others."""
        if self._schema is True:  # conforms to anything, and the options need an object
            yield "{}"
            return
        _refuse_counted_names(self._field, self._schema)
        yield self._text
        draft = _draft(self._schema)
        if draft is None:
            return
        try:
            simpler = Rewriting(self._schema, draft).of(copy.deepcopy(self._schema))
        except _NOT_WORTH_IT:
            return
        text = json.dumps({"allOf": [simpler]} if isinstance(simpler, bool) else simpler)
        if text != json.dumps(self._schema):  # 2.0 equals 2, but not for the library
            yield text


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _draft(schema: dict[str, Any]) -> int | None:
    """Its draft as a number, None for those that are too old to be rewritten."""
    named = str(schema.get("$schema", ""))
    if any(f"draft-0{number}" in named for number in (3, 4)):
        return None
    if "2019-09" in named:
        return 2019
    return next((number for name, number in _OLD.items() if name in named), _LATEST)


def _refuse_counted_names(field: str, schema: Any) -> None:
    """A name may come twice among those that the schema does not list, and counts once for who reads the text."""
    for each in _all_schemas(field, schema):
        least, required = each.get("minProperties"), each.get("required")
        named = len(set(map(str, required))) if isinstance(required, list) else 0
        if isinstance(least, int | float) and least > max(1, named):
            problem = f"minProperties of {least} with {named} required names could be met by one name twice"
            raise InvalidField(field, f"does not compile: {problem}; allowed: up to the number of required names")


def _all_schemas(field: str, schema: Any) -> list[dict[str, Any]]:
    try:
        return list(_schemas_in(schema))
    except RecursionError as error:
        raise InvalidField(field, "is no JSON schema: nested too deeply") from error


def _schemas_in(schema: Any) -> Iterator[dict[str, Any]]:
    """The schema and all that it is made of, wherever a schema may stand."""
    if isinstance(schema, dict):
        yield schema
        for key, value in schema.items():
            if key in _NAMED and isinstance(value, dict):
                inner = list(value.values())
            elif key in _LIST and isinstance(value, list):
                inner = value
            else:
                inner = [value] if key in _ONE + _ONE_LATER else []
            for each in inner:
                yield from _schemas_in(each)


class Rewriting:
    """Of schemas in the document ``root``, which is only read; schemas are changed in place."""

    def __init__(self, root: dict[str, Any], draft: int) -> None:
        self._draft = draft
        self._not = Negation(root, draft)

    def of(self, schema: Any) -> Any:
        if not isinstance(schema, dict) or ("$ref" in schema and self._draft <= 7):  # what stands beside it is ignored
            return schema
        say_as_additional(schema, self._draft, self._not.target)  # before what it depends on is moved
        self._inner(schema)
        more: list[Any] = []
        self._plain(schema)
        for rule in (self._names, self._dependent, self._if, self._other, self._one_of):
            more += rule(schema)
        more = [each for each in more if each not in (True, {})]
        if False in more:
            return False
        if more:
            schema["allOf"] = [*schema.get("allOf", []), *more]
        return schema

    def _inner(self, schema: dict[str, Any]) -> None:
        for key, value in schema.items():
            if key in _NAMED and isinstance(value, dict):
                schema[key] = {name: self.of(each) for name, each in value.items()}
            elif key in _LIST and isinstance(value, list):
                schema[key] = [self.of(each) for each in value]
            elif key in _ONE + _ONE_LATER:
                schema[key] = self.of(value)

    def _plain(self, schema: dict[str, Any]) -> None:
        """Counts written as 2.0, and keywords that let everything through."""
        for key in _COUNTS:
            value = schema.get(key)
            if isinstance(value, float) and value.is_integer():
                schema[key] = int(value)
        if isinstance(schema.get("format"), str) and schema["format"] not in _FORMATS:
            del schema["format"]
        most = schema.get("maxItems")
        if schema.get("uniqueItems") is False or (isinstance(most, int) and most <= 1):
            schema.pop("uniqueItems", None)
        may_lack = schema.get("minContains") == 0 and "maxContains" not in schema
        if self._draft >= 2019 and ("contains" not in schema or may_lack):
            for key in ("contains", "minContains", "maxContains"):
                schema.pop(key, None)
        if schema.get("contains") in (True, {}) and not {"minContains", "maxContains"} & schema.keys():
            del schema["contains"]
            schema["minItems"] = max(1, schema.get("minItems", 0))

    def _names(self, schema: dict[str, Any]) -> list[Any]:
        """Of `propertyNames` those that are a pattern, a length or a list."""
        names = schema.get("propertyNames")
        pattern = self._not.pattern_of(names)
        if names is None or (pattern is None and names not in (True, False)):
            return []
        del schema["propertyNames"]
        if names is True:
            return []
        allowed = {} if names is False else {pattern: True}
        return [{"patternProperties": allowed, "additionalProperties": False}]

    def _dependent(self, schema: dict[str, Any]) -> list[Any]:
        """A property is absent, or what depends on it holds."""
        keys = ("dependencies",) if self._draft <= 7 else ("dependentRequired", "dependentSchemas")
        more = []
        for key in keys:
            for name, needed in (schema.pop(key, None) or {}).items():
                then = {"required": needed} if isinstance(needed, list) else needed
                if then not in (True, {}, {"required": []}):
                    absent = {"properties": {name: False}}
                    more.append(absent if then is False else {"anyOf": [absent, then]})
        return more

    def _if(self, schema: dict[str, Any]) -> list[Any]:
        if self._draft < 7:
            return []
        condition, then, otherwise = (schema.get(key) for key in ("if", "then", "else"))
        says = condition is not None and (then is not None or otherwise is not None)
        unless = self._not.of(condition) if says else None
        if says and unless is None:
            return []
        for key in ("if", "then", "else"):
            schema.pop(key, None)
        if not says:
            return []
        return [_any_of([_all_of([condition, then]), _all_of([unless, otherwise])])]

    def _other(self, schema: dict[str, Any]) -> list[Any]:
        wanted = self._not.of(schema["not"]) if "not" in schema else None
        if wanted is None:
            return []
        del schema["not"]
        return [wanted]

    def _one_of(self, schema: dict[str, Any]) -> list[Any]:
        """Each member without all the others."""
        members = schema.get("oneOf")
        if not isinstance(members, list):
            return []
        others = [self._not.of(member) for member in members]
        if len(members) > 1 and None in others:
            return []
        del schema["oneOf"]
        return [_any_of([_all_of([m, *others[:i], *others[i + 1 :]]) for i, m in enumerate(members)])]


def _all_of(members: list[Any]) -> Any:
    kept = [each for each in members if each is not None and each is not True and each != {}]
    if False in kept:
        return False
    return kept[0] if len(kept) == 1 else {"allOf": kept} if kept else True


def _any_of(members: list[Any]) -> Any:
    kept = [each for each in members if each is not False]
    if any(each is True or each == {} for each in kept):
        return True
    return kept[0] if len(kept) == 1 else {"anyOf": kept} if kept else False
