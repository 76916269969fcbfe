"""Hostile constraints: each ends within limits, and says which."""

from __future__ import annotations

import json

import pytest

from pyruntime.errors import InvalidField
from tests.fakes import EOS

DOUBLING = "\n".join([*(f"T{i}: T{i + 1} T{i + 1}" for i in range(40)), 'T40: "a"'])
DOUBLING_RULES = "\n".join([*(f"r{i}: r{i + 1} r{i + 1}" for i in range(40)), 'r40: "a"'])
NESTED_NOT = '{"not":' * 400 + "{}" + "}" * 400
ONE_OF_EACH_OTHER = {"oneOf": [{"properties": {f"p{i}": {"enum": [f"v{j}" for j in range(40)]}}} for i in range(60)]}
BOMBS = {
    "unclosed": ("regex", "(" * 30_000, "invalid regex"),
    "look-ahead": ("regex", "a(?=b)", "look-around"),
    "a back-reference": ("regex", r"(a)\1", "backreferences"),
    "counts of all letters": ("regex", r"((\p{L}{1,1000}){1,1000}x){1,1000}", "costly"),
    "no regex": ("regex", "[z-a]", "does not compile"),
    "no UTF-8": ("regex", r"(?-u)\xff", "does not compile"),
    "nested brackets": ("json_schema", "[" * 60_000, "is no JSON schema"),
    "nested objects": ("json_schema", '{"properties":{"a":' * 2000 + "{}" + "}}" * 2000, "is no JSON schema"),
    "nested not": ("json_schema", NESTED_NOT, "is no JSON schema"),
    "a list": ("json_schema", "[1]", "not list"),
    "a number that is none": ("json_schema", '{"minimum": NaN}', "NaN is no JSON"),
    "false": ("json_schema", "false", "no text conforms"),
    "not anything": ("json_schema", '{"not":{}}', "does not compile"),
    "a reference to itself": ("json_schema", '{"$ref":"#"}', "no text conforms"),
    "two references to each other": (
        "json_schema",
        '{"$ref":"#/$defs/a","$defs":{"a":{"$ref":"#/$defs/b"},"b":{"$ref":"#/$defs/a"}}}',
        "no text conforms",
    ),
    "a remote file": ("json_schema", '{"$ref":"file:///etc/hostname"}', "does not compile"),
    "a remote page": ("json_schema", '{"$ref":"http://127.0.0.1:1/"}', "does not compile"),
    "names that may be one twice": ("json_schema", '{"type":"object","minProperties":3}', "one name twice"),
    "ill-formed": ("json_schema", '{"dependentRequired":[1],"oneOf":{"a":1},"if":3,"then":[]}', "does not compile"),
    "many choices of one": ("json_schema", json.dumps(ONE_OF_EACH_OTHER), "does not compile"),
    "doubling terminals": ("grammar", f"start: T0\n{DOUBLING}", "too big"),
    "terminals of themselves": ("grammar", 'start: A\nA: A "a" | "b"', "circular"),
    "a rule of itself": ("grammar", "start: start", "no text conforms"),
    "without an end": ("grammar", 'start: "a" start', "cannot be followed"),
    "without a start": ("grammar", 'begin: "a"', "start"),
    "empty": ("grammar", 'start: ""', "but the empty one"),
    "empty rules without end": ("grammar", "start: x*\nx: y*\ny: x*", "but the empty one"),
    "unknown tokens": ("grammar", 'start: "a" <|nothing|>', "unknown special token"),
    "tokens out of range": ("grammar", "start: <[70000]>", "too large"),
    "no texts": ("grammar", '%llguidance {"allow_invalid_utf8": true}\nstart: /a/', "allow_invalid_utf8"),
    "a list of grammars": ("grammar", '{"grammars":[{"lark_grammar":"start: \\"a\\""}]}', "begins with {"),
    "broken GBNF": ("grammar", 'root ::= "a" (', "does not compile: GBNF"),
    "GBNF without a root": ("grammar", 'a ::= "b"', "root"),
}


@pytest.mark.parametrize(("kind", "text", "problem"), BOMBS.values(), ids=BOMBS)
async def test_hostile_texts_are_refused_within_limits(compile_, kind, text, problem):
    with pytest.raises(InvalidField) as caught:
        constraint = await compile_(kind, text)
        matcher = constraint.matcher(frozenset({EOS}))
        for _ in range(50):  # those that compile end here
            matcher.advance(next(i for i in range(256) if matcher.allows(i)))
    assert caught.value.field == f"constraint.{kind}"
    assert problem in caught.value.problem
    assert len(caught.value.message) < 400


FOLLOWED = {
    "a huge count": ("regex", "a{1,4000000000}"),
    "counts of counts": ("regex", "((((a{1,999}){1,999}){1,999}b){1,999}c?){1,999}" * 40),
    "many ways to read it": ("grammar", 'start: s\ns: s s | s s s | "a" | "b" | /[a-z ]/'),
    "doubling rules": ("grammar", f"start: r0\n{DOUBLING_RULES}"),
    "left and right": ("grammar", 'start: s\ns: "a" s | s "a" | "a" | s s |'),
    "empty productions": ("grammar", 'start: a\na: b a b | "a"\nb: c*\nc: | "a" | c c'),
    "exponential for backtracking": ("regex", "(a+)+(a|aa)*(a*)*b?"),
    "all but a letter far back": ("regex", "(a|b)*a(a|b){400}"),
    "long": ("json_schema", '{"type":"string","minLength":100000,"maxLength":1000000000}'),
    "many items": ("json_schema", '{"type":"array","items":{"type":"integer"},"minItems":100000}'),
    "one prefix": ("choice", *("a" * 1000 + f"{i:04}" for i in range(60))),
    "many options": ("choice", *(f"a{i:05}" for i in range(1024))),
    "all texts": ("json_schema", "true"),
    "a control character": ("regex", "a+\x00?"),
}


@pytest.mark.parametrize("constraint", FOLLOWED.values(), ids=FOLLOWED)
async def test_what_costs_nothing_until_it_is_followed_ends_within_limits(compile_, constraint):
    """Each token within the limits of a step, all of them within that of a request; or an error that says so."""
    followed = 0
    try:
        matcher = (await compile_(*constraint)).matcher(frozenset({EOS}))
        while followed < 80:
            ahead = [i for i in (ord("a"), ord('"'), ord("1"), ord("["), ord(","), ord("0")) if matcher.allows(i)]
            if matcher.advance(ahead[0] if ahead else next(i for i in range(256) if matcher.allows(i))):
                break
            followed += 1
    except InvalidField as error:
        assert "costly to follow" in error.problem or "cannot be followed" in error.problem
    assert followed or constraint[0] != "choice"
