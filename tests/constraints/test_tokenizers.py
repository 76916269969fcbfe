"""The text that is detokenised is the text that was constrained, for each way of spelling bytes."""

from __future__ import annotations

import json
import random
import re

import pytest

from pyruntime.constraints.grammar import ConstraintText
from pyruntime.errors import CapabilityMissing
from tests.test_tokenization import KINDS, make

PATTERN = "(hell|é|日|w+| s){2,9}x"
SCHEMA = (
    '{"type":"object","properties":{"hello":{"enum":["é 日", 1]}},"required":["hello"],"additionalProperties":false}'
)


def walk(constraint, eos_id: int, rng: random.Random) -> list[int]:
    """Tokens drawn evenly from the masks, up to the end."""
    matcher = constraint.matcher(frozenset({eos_id}))
    ids: list[int] = []
    while True:
        allowed = [i for i in range(constraint.vocab_size) if matcher.allows(i)]
        ids.append(rng.choice(allowed))
        if ids[-1] == eos_id:
            return ids[:-1]
        if matcher.advance(ids[-1]):
            return ids


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "byte_fallback_stripped"])
async def test_tokens_spell_what_was_constrained(compiler, kind):
    tokenizer = make(KINDS[kind]())
    size = tokenizer.vocab_size
    rng = random.Random(3)
    pattern = await compiler.compile(ConstraintText("regex", (PATTERN,)), tokenizer, size, frozenset({2}))
    schema = await compiler.compile(ConstraintText("json_schema", (SCHEMA,)), tokenizer, size, frozenset({2}))
    for _ in range(60):
        detokenizer = tokenizer.detokenizer()
        text = "".join(detokenizer.push(i) for i in walk(pattern, 2, rng)) + detokenizer.flush()
        dropped = kind == "byte_fallback_stripped" and re.fullmatch(PATTERN, " " + text)
        assert dropped or re.fullmatch(PATTERN, text), text
        assert json.loads(tokenizer.decode(walk(schema, 2, rng)))["hello"] in ["é 日", 1]


@pytest.mark.parametrize("kind", ["word_piece", "metaspace"])
async def test_tokens_that_spell_no_bytes_are_refused(compiler, kind):
    tokenizer = make(KINDS[kind]())
    with pytest.raises(CapabilityMissing, match="do not work with this tokenizer"):
        await compiler.compile(ConstraintText("regex", ("a",)), tokenizer, tokenizer.vocab_size, frozenset({0}))
