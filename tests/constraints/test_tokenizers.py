"""The text that is detokenised is the text that was constrained, for each way of spelling bytes."""

from __future__ import annotations

import itertools
import json
import random
import re

import pytest
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from pyruntime.constraints.grammar import ConstraintText
from pyruntime.constraints.spelling import spelling_of
from pyruntime.constraints.vocabulary import Vocabulary
from pyruntime.errors import CapabilityMissing
from tests.tokenizer_kinds import KINDS, byte_level, make

SCHEMA = (
    '{"type":"object","properties":{"hello":{"enum":["é 日", 1]}},"required":["hello"],"additionalProperties":false}'
)
REFUSED_KINDS = {"end_of_word"}
SPELLED = sorted(KINDS.keys() - REFUSED_KINDS)
ANY_TEXT = "(hell|é|日|w+| s){2,9}x"
WORDS = "(hello|world|s|t[ho]|stream)( (a|the|token|cache|e)s?){1,3}"
PATTERNS = {
    "word_piece": WORDS,
    "no_decoder": "[a-e]( [aehlost]){1,4}",
    "metaspace": "(he|l+|world| |st)( ?[a-e]| the){2,6}",
}
PATTERNS |= dict.fromkeys(("unigram", "unigram_fallback"), "(h|s|ell)?(ell|o|top|e|n|d| |!|é| h| wor){2,6}")
PATTERNS |= dict.fromkeys(("byte_level", "byte_level_in_steps", "byte_fallback", "byte_fallback_stripped"), ANY_TEXT)


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


def text_of(tokenizer, ids: list[int]) -> str:
    detokenizer = tokenizer.detokenizer()
    return "".join(detokenizer.push(i) for i in ids) + detokenizer.flush()


@pytest.mark.parametrize("kind", SPELLED)
async def test_tokens_spell_what_was_constrained(compiler, kind):
    tokenizer = make(KINDS[kind]())
    size, rng, pattern = tokenizer.vocab_size, random.Random(3), PATTERNS[kind]
    constraint = await compiler.compile(ConstraintText("regex", (pattern,)), tokenizer, size, frozenset({2}))
    texts = {text_of(tokenizer, walk(constraint, 2, rng)) for _ in range(120)}
    assert all(re.fullmatch(pattern, text) for text in texts), texts
    assert len(texts) > 20


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "byte_fallback_stripped"])
async def test_json_is_spelled_where_there_are_all_bytes(compiler, kind):
    tokenizer = make(KINDS[kind]())
    text = ConstraintText("json_schema", (SCHEMA,))
    constraint = await compiler.compile(text, tokenizer, tokenizer.vocab_size, frozenset({2}))
    for seed in range(40):
        ids = walk(constraint, 2, random.Random(seed))
        assert json.loads(text_of(tokenizer, ids))["hello"] in ["é 日", 1]


@pytest.mark.parametrize("kind", SPELLED)
async def test_all_that_begins_the_text_may_begin_it(compiler, kind):
    """The mask of the beginning against the text of each token alone, that behind a token against its text there."""
    tokenizer = make(KINDS[kind]())
    size, pattern = tokenizer.vocab_size, " ?(h|he|l|the|s)[a-z ]*"
    constraint = await compiler.compile(ConstraintText("regex", (pattern,)), tokenizer, size, frozenset({2}))
    forced = constraint.vocabulary.forces_tokens
    matcher = constraint.matcher(frozenset({2}))
    begin = re.compile(f"{pattern}| ?(t|th)?")
    plain = [i for i in range(size) if i not in tokenizer.special_token_ids and i != 2]
    alone = {i: tokenizer.decode([i], skip_special_tokens=False) for i in plain}
    expected = {i for i, text in alone.items() if text and begin.fullmatch(text)}
    first = {i for i in plain if matcher.allows(i)}
    assert first == expected
    start = next(i for i in first if tokenizer.decode([i]) == "he" or tokenizer.decode([i]) == "h")
    matcher.advance(start)
    after = {i for i in plain if re.fullmatch(pattern, tokenizer.decode([start, i])) and tokenizer.decode([i]) != ""}
    assert {i for i in plain if matcher.allows(i)} >= after or forced
    assert all(re.fullmatch(pattern, tokenizer.decode([start, i])) for i in plain if matcher.allows(i))


@pytest.mark.parametrize("kind", SPELLED)
def test_the_bytes_of_tokens_joined_are_the_text(kind):
    tokenizer = make(KINDS[kind]())
    spelling = spelling_of(tokenizer)
    rng = random.Random(1)
    plain = [i for i in range(tokenizer.vocab_size) if i not in tokenizer.special_token_ids]
    for _ in range(300):
        ids = rng.choices(plain, k=rng.randint(1, 12))
        words = [spelling.first.get(ids[0], spelling.later[ids[0]]), *(spelling.later[i] for i in ids[1:])]
        try:
            expected = b"".join(words).decode()
        except UnicodeDecodeError:  # constraints let only texts through
            continue
        assert tokenizer.decode(ids, skip_special_tokens=False) == expected


async def test_special_tokens_are_no_text_and_other_added_ones_are(compiler):
    backend = byte_level()
    backend.add_tokens([AddedToken("<tag>", special=False)])
    tokenizer = make(backend)
    size, end = tokenizer.vocab_size, backend.token_to_id("<|end|>")
    for option in ["<|end|>", "<tag>", "a<|end|>b<tag>"]:
        constraint = await compiler.compile(ConstraintText("choice", (option,)), tokenizer, size, frozenset({2}))
        ids = walk(constraint, 2, random.Random(0))
        assert text_of(tokenizer, ids) == option
        assert end not in ids
    grammar = ConstraintText("grammar", ('start: "a" <|end|> "b"',))
    ids = walk(await compiler.compile(grammar, tokenizer, size, frozenset({2})), 2, random.Random(0))
    assert end in ids
    assert text_of(tokenizer, ids) == "ab"


async def test_an_end_of_sequence_token_that_has_a_text_is_no_text(compiler):
    tokenizer = make(byte_level())
    (eos_id,) = tokenizer.encode("\n")
    constraint = await compiler.compile(
        ConstraintText("regex", ("a[\n x]b",)), tokenizer, tokenizer.vocab_size, frozenset({eos_id, 2})
    )
    matcher = constraint.matcher(frozenset({eos_id, 2}))
    assert not matcher.advance(*tokenizer.encode("a"))
    assert matcher.allows(*tokenizer.encode("x"))
    assert not matcher.allows(eos_id)
    assert not matcher.advance(*tokenizer.encode("x"))
    assert matcher.advance(*tokenizer.encode("b"))


@pytest.mark.parametrize("extra", [0, 1, 31, 32, 33, 100])
async def test_models_and_tokenizers_need_not_be_of_one_size(compiler, extra):
    tokenizer = make(KINDS["byte_fallback_stripped"]())
    for size in (tokenizer.vocab_size + extra, tokenizer.vocab_size - extra):
        constraint = await compiler.compile(ConstraintText("regex", ("[ab]{2}",)), tokenizer, size, frozenset({2}))
        matcher = constraint.matcher(frozenset({2}))
        assert len(matcher.mask) == (size + 31) // 32
        allowed = [i for i in range(len(matcher.mask) * 32) if matcher.allows(i)]
        assert allowed
        assert max(allowed) < size
        matcher.advance(allowed[0])
        assert all(i < size for i in range(len(matcher.mask) * 32) if matcher.allows(i))


def broken(decoder) -> Backend:
    backend = KINDS["metaspace"]()
    backend.decoder = decoder
    return backend


REFUSED = {
    "ends of words": (lambda: broken(decoders.BPEDecoder()), "step BPEDecoder"),
    "repeats": (lambda: broken(decoders.CTC()), "step CTC"),
    "the end stripped": (lambda: broken(decoders.Strip(" ", 0, 1)), "Strip reads across"),
    "replaced when joined": (
        lambda: broken(decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "c")])),
        "Replace",
    ),
    "no letters": (lambda: Backend(models.WordLevel({"[UNK]": 0, ".": 1, "!": 2}, unk_token="[UNK]")), "letters"),
}


@pytest.mark.parametrize(("backend", "problem"), REFUSED.values(), ids=REFUSED)
def test_tokens_that_are_not_spelled_one_by_one_are_refused(backend, problem):
    made = backend()
    with pytest.raises(CapabilityMissing, match=f"do not work with this tokenizer.*{problem}"):
        Vocabulary(_tokenizer(made), 80, frozenset({0}))


def _tokenizer(backend):
    try:
        return make(backend)
    except Exception:  # a text that has no tokens of its own cannot be served at all
        pytest.skip("this tokenizer is refused at load")


async def test_words_of_all_lengths_are_let_through_as_pythons(compiler):
    """Whatever the tokens: the texts that can be spelled are those that conform."""
    tokenizer = make(KINDS["word_piece"]())
    size = tokenizer.vocab_size
    pattern = "(a|the)( (a|the))?"
    constraint = await compiler.compile(ConstraintText("regex", (pattern,)), tokenizer, size, frozenset({2}))
    found = {text_of(tokenizer, walk(constraint, 2, random.Random(seed))) for seed in range(60)}
    assert found == {" ".join(each) for k in (1, 2) for each in itertools.product(["a", "the"], repeat=k)}
