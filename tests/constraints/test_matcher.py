"""What a matcher lets through, against every text of a small alphabet."""

from __future__ import annotations

import itertools
import json
import random
import re

import jsonschema
import pytest

from pyruntime.constraints.grammar import ConstraintText
from pyruntime.errors import InvalidField
from tests.fakes import EOS

STOPS = frozenset({EOS})
OPTIONS = ["a", "ab", 'q"\\\n\t', "é\u2028", "\x00\x7f", "/x/", "<s>", "😀", "\\u0041"]


def accepts(constraint, text: str) -> bool:
    """Whether a continuation could spell ``text`` and end there, token by token through the masks."""
    matcher = constraint.matcher(STOPS)
    tokens = list(text.encode())
    for place, token in enumerate(tokens):
        if not matcher.allows(token):
            return False
        if matcher.advance(token):  # nothing may follow
            return place == len(tokens) - 1
    return matcher.allows(EOS)


def words(alphabet: str, longest: int) -> list[str]:
    return ["".join(each) for size in range(1, longest + 1) for each in itertools.product(alphabet, repeat=size)]


@pytest.mark.parametrize(
    "pattern", ["a", "ab?", "a+b*", "(ab|c)+", "[^a]{2,3}", "^a.c$", "(?:a|b){3}", "a|bc|", "(?i)AB", r"\w\S"]
)
async def test_a_regex_lets_the_same_words_through_as_pythons(compile_, pattern):
    constraint = await compile_("regex", pattern)
    for word in words("abc", 4):
        assert accepts(constraint, word) == bool(re.fullmatch(pattern, word)), word


async def test_a_choice_lets_its_options_through_and_nothing_else(compile_):
    constraint = await compile_("choice", *OPTIONS)
    assert all(accepts(constraint, option) for option in OPTIONS)
    assert not any(accepts(constraint, text) for text in ["b", "aba", "q", "é", "A", "x", "/"])


async def test_a_grammar_may_recurse(compile_):
    constraint = await compile_("grammar", 'start: pair+\npair: "(" pair* ")" | WORD\nWORD: /c+/')
    for word in words("()c", 5):
        left = word.replace("c", "")
        while "()" in left:
            left = left.replace("()", "")
        assert accepts(constraint, word) == (not left), word


SCHEMAS = [
    {"type": "integer", "minimum": 3, "maximum": 12},
    {"type": "array", "items": {"enum": [1, "a"]}, "minItems": 1, "maxItems": 2},
    {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False},
    {"type": "string", "pattern": "^[ab]{1,2}$"},
    {"anyOf": [{"const": None}, {"const": [2]}]},
    {"$ref": "#/$defs/x", "$defs": {"x": {"type": ["null", "integer"], "maximum": 9, "minimum": 0}}},
]
VALUES = [*range(15), None, True, [], [1], ["a", 1], [1, 1, 1], [2], {}, {"a": True}, {"a": 1}, "a", "ab", "abb", ""]


@pytest.mark.parametrize("schema", SCHEMAS, ids=str)
async def test_a_schema_lets_the_same_values_through_as_jsonschema(compile_, schema):
    constraint = await compile_("json_schema", json.dumps(schema))
    validator = jsonschema.Draft202012Validator(schema)
    for value in VALUES:
        assert accepts(constraint, json.dumps(value)) == validator.is_valid(value), value


async def test_white_space_between_json_tokens_is_bounded(compile_):
    constraint = await compile_("json_schema", '{"type":"array","items":{"const":1}}')
    assert accepts(constraint, "[" + " \n" * 16 + "1 ]")
    assert not accepts(constraint, "[" + " \n" * 16 + " 1]")
    assert not accepts(constraint, " [1]")


async def test_options_in_a_schema_do_not_loosen_it(compile_):
    with pytest.raises(InvalidField, match="uniqueItems"):
        await compile_("json_schema", '{"x-guidance":{"lenient":true},"uniqueItems":true}')
    with pytest.raises(InvalidField, match="oneOf"):
        schema = '{"x-guidance":{"coerce_one_of":true},"oneOf":[{"multipleOf":3},{"multipleOf":5}]}'
        await compile_("json_schema", schema)
    schema = '{"x-guidance":{"whitespace_pattern":"x*","item_separator":";"},"type":"array","items":{"const":1}}'
    constraint = await compile_("json_schema", schema)
    assert accepts(constraint, "[1, 1]")
    assert not accepts(constraint, "[1;1]")
    assert not accepts(constraint, "[1,x1]")


async def test_a_schema_may_want_no_white_space(compile_):
    schema = '{"x-guidance":{"whitespace_flexible":false},"type":"array","items":{"const":1}}'
    constraint = await compile_("json_schema", schema)
    assert accepts(constraint, "[1,1]")
    assert not accepts(constraint, "[1, 1]")


async def test_each_continuation_has_a_matcher_of_its_own(compile_):
    constraint = await compile_("regex", "ab|cd")
    first, second = constraint.matcher(STOPS), constraint.matcher(STOPS)
    assert not first.advance(ord("a"))
    assert first.allows(ord("b"))
    assert second.allows(ord("c"))
    assert not second.allows(ord("b"))


async def test_an_end_that_does_not_count_is_left_out_while_more_may_follow(compile_):
    constraint = await compile_("regex", "ab?")
    matcher = constraint.matcher(frozenset())
    assert not matcher.advance(ord("a"))
    assert matcher.allows(ord("b"))
    assert not matcher.allows(EOS)
    assert matcher.advance(ord("b"))


async def test_each_of_several_ends_counts_where_the_text_may_end(compiler, tokenizer):
    ends = frozenset({EOS, 256})
    constraint = await compiler.compile(ConstraintText("regex", ("ab?",)), tokenizer, 260, ends)
    for stops, allowed in [(ends, [True, True]), (STOPS, [True, False]), (frozenset(), [False, False])]:
        matcher = constraint.matcher(stops)
        assert not matcher.allows(EOS)
        assert not matcher.advance(ord("a"))
        assert [matcher.allows(EOS), matcher.allows(256)] == allowed
        assert matcher.advance(ord("b"))


async def test_a_vocabulary_that_cannot_go_on_is_an_error(compile_):
    constraint = await compile_("regex", "ad", vocab_size=258)
    assert not constraint.matcher(STOPS).advance(ord("a"))
    matcher = constraint.matcher(STOPS)
    with pytest.raises(InvalidField, match=r"constraint\.regex: cannot be followed"):
        matcher.advance(ord("d"))


async def test_ids_that_the_model_lacks_are_in_no_mask(compile_, tokenizer, compiler):
    constraint = await compile_("regex", "[\x00-\x7f]+", vocab_size=258)
    matcher = constraint.matcher(STOPS)
    allowed = [i for i in range(len(matcher.mask) * 32) if int(matcher.mask[i // 32]) >> (i % 32) & 1]
    assert allowed == list(range(128))
    assert matcher.allows_any_but(range(127))
    assert not matcher.allows_any_but(range(128))


FORESEEN = {
    "json_schema": '{"properties": {"name": {"type": "string"}, "it": {"enum": ["abc", "abd"]}}, "required": ["name"]}',
    "regex": r"(abc){2,4}[ab]{0,3}(def)?",
    "choice": "a choice of one",
    "grammar": 'root ::= "begin " item+ "end"\nitem ::= "item " [0-9]+ "; "',
}


@pytest.mark.parametrize(("kind", "text"), FORESEEN.items())
async def test_what_is_foreseen_is_what_following_finds(compile_, kind, text):
    """Random walks with guesses right and wrong: nothing moves, and each mask is that of the walk without guesses."""
    constraint, rng = await compile_(kind, text), random.Random(kind)
    num_foreseen = num_true = 0
    for _ in range(12):
        matcher, plain = constraint.matcher(STOPS), constraint.matcher(STOPS)
        for _ in range(60):
            allowed = [token for token in range(256) if plain.allows(token)]
            if not allowed:
                break
            walk = [rng.choice(allowed), *rng.choices(b"abcdefin0;", k=3)]
            if rng.random() < 0.6:  # else what has come true of what was foreseen before has to do
                found = matcher.foresee(walk if rng.random() < 0.7 else [], rng.randrange(6))
                assert found == [each.token_id for each in matcher.foreseen]
            found = [each.token_id for each in matcher.foreseen]
            token = found[0] if found and rng.random() < 0.8 else rng.choice(allowed)
            num_foreseen, num_true = num_foreseen + len(found), num_true + (found[:1] == [token])
            is_complete = plain.advance(token)
            assert matcher.advance(token) == is_complete
            assert matcher.mask.tolist() == plain.mask.tolist()
            if is_complete:
                break
    assert num_foreseen > num_true > 30


async def test_text_without_a_choice_is_foreseen_up_to_its_end(compile_):
    matcher = (await compile_("regex", "abcdef[gh]")).matcher(STOPS)
    assert bytes(matcher.foresee([], 4)) == b"abcd"
    assert bytes(matcher.foresee([], 9)) == b"abcdef"
    assert bytes(matcher.foresee(list(b"abcdefg"), 9)) == b"abcdef"  # nothing may follow the g
    assert bytes(matcher.foresee(list(b"xyz"), 9)) == b"abcdef"
    assert matcher.foresee([], 0) == []
    costly = (await compile_("regex", "abcdef[gh]")).matcher(STOPS)
    costly.constraint.note_guess(1.0)
    assert costly.foresee([], 9) == []


async def test_a_request_is_costly_until_its_tokens_have_made_up_for_it(compile_):
    """Whatever the time of one token: 10 ms are borne at once, and 0.3 ms more a token."""
    constraint = await compile_("regex", "(ab)*")
    for _ in range(100):
        constraint.spend(0.0003)
    constraint.spend(0.009)
    assert not constraint.is_costly
    constraint.spend(0.002)
    assert constraint.is_costly
    for _ in range(3):
        constraint.spend(0.0001)
    assert not constraint.is_costly
    constraint.spend(0.5)  # one hard place is made up for within some tokens
    assert constraint.is_costly
    for _ in range(40):
        constraint.spend(0.00002)
    assert not constraint.is_costly
