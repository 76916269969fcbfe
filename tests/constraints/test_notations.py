"""What users of other servers write: GBNF, tags around calls, any JSON, patterns with every sign."""

from __future__ import annotations

import itertools
import json
import re

import pytest

from pyruntime.errors import InvalidField
from tests.constraints.test_matcher import accepts, words

# (grammar, a pattern of Python's that says the same)
GBNF = [
    ('root ::= "a" [0-9]{1,2} x?\nx ::= "-" | "-" root', r"a[0-9]{1,2}(-(a[0-9]{1,2}(-(a[0-9])?)?)?)?"),
    ('root ::= item ("," item)*\nitem ::= "a" | "0" # comment', "[a0](,[a0])*"),
    ('root  ::=\n  sign-ed? ( "0" | [a-b]+ )\nsign-ed ::= "-"', "-?(0|[ab]+)"),
]


@pytest.mark.parametrize(("grammar", "pattern"), GBNF)
async def test_gbnf_lets_its_words_through(compile_, grammar, pattern):
    constraint = await compile_("grammar", grammar)
    found = {word for word in words("a0,-", 5) if accepts(constraint, word)}
    assert found == {word for word in words("a0,-", 5) if re.fullmatch(pattern, word)}


async def test_a_lark_grammar_with_the_signs_of_gbnf_in_a_text_is_one_of_lark(compile_):
    assert accepts(await compile_("grammar", '?start: "root ::= x"'), "root ::= x")


async def test_one_rule_calls_tools_with_arguments_that_conform(compile_):
    """What other servers call a structural tag."""
    schema = json.dumps({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})
    grammar = f'start: TEXT ("<call>" %json {schema} "</call>" TEXT)*\nTEXT: /[^<]*/'
    constraint = await compile_("grammar", grammar)
    assert accepts(constraint, 'so <call>{"n": 12}</call> it is')
    assert not accepts(constraint, 'so <call>{"n": "12"}</call> it is')
    assert accepts(constraint, "nothing to call")


ANY_JSON = ["{}", '{"a": [1, null, "é", {"b": -1.5e3}]}', "[]", "true", "null", '"x"', "12"]


async def test_any_json(compile_):
    for schema in ("{}", "true", " true\n"):
        constraint = await compile_("json_schema", schema)
        assert all(accepts(constraint, text) for text in ANY_JSON)
        assert not any(accepts(constraint, text) for text in ["{", "nil", "'x'", '{"a"}', "[1,]"])
    objects = await compile_("json_schema", '{"type":"object"}')
    assert [accepts(objects, text) for text in ANY_JSON] == [True, True, False, False, False, False, False]


SIGNS = ["a/b", "/", 'a/ | "b"', r"\\/", "a#b", "a\nb", " a ", r"\x41", "%json", r"//.\*", "start: b", "<[1]>"]


@pytest.mark.parametrize("pattern", SIGNS)
async def test_a_pattern_is_never_read_as_a_grammar(compile_, pattern):
    constraint = await compile_("regex", pattern)
    alphabet = sorted({*pattern, "A", "b"})
    found = [
        w for w in [*map("".join, itertools.product(alphabet, repeat=2)), pattern, "b", "A"] if accepts(constraint, w)
    ]
    assert found == [word for word in found if re.fullmatch(pattern, word)]
    assert accepts(constraint, "A" if pattern == r"\x41" else "\\/" if pattern == r"\\/" else "b") or "b" not in found


@pytest.mark.parametrize(
    "options", [["a/b", "/x/"], ['q"', "\\"], ["a", "ab", "abc"], ["\x00", "\x7f"], ["%json {}", "<[1]>"]]
)
async def test_options_are_texts_whatever_their_signs(compile_, options):
    constraint = await compile_("choice", *options)
    assert all(accepts(constraint, option) for option in options)
    assert not accepts(constraint, options[0] + options[-1])


async def test_a_thousand_options_are_followed(compile_):
    options = [f"name {i:04} of many" for i in range(1024)]
    constraint = await compile_("choice", *options)
    assert all(accepts(constraint, option) for option in options[::97])
    assert not accepts(constraint, "name 1024 of many")


@pytest.mark.parametrize("text", ['root ::= "a', "::=", 'a ::= "x"\nb: "y"', "root ::= [a", "root ::= a"])
async def test_gbnf_that_is_none_says_so(compile_, text):
    with pytest.raises(InvalidField, match=r"constraint\.grammar: "):
        await compile_("grammar", text)
