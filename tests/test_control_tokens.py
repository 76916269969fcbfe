"""What messages say never becomes a control token, over all kinds of tokenizers and templates of known forms."""

from __future__ import annotations

import random

import pytest
from tokenizers import AddedToken, normalizers, pre_tokenizers, trainers

from pyruntime.control_tokens import MarkedText
from pyruntime.errors import InvalidField
from pyruntime.tokenization import Tokenizer
from tests.tokenizer_kinds import KINDS, byte_level, make

TURNS = (
    "{% for m in messages %}<s>{{ m.role }}{{ m.name }}\n{{ m.content }}</s>\n{% endfor %}"
    "{% for t in tools or [] %}<tool>{{ t | tojson }}{% endfor %}"
    "{% if add_generation_prompt %}<s>bot\n{% endif %}{{ end }}"
)
# Takes an answer apart, as templates of reasoning models do.
THOUGHTS = (
    "{% for m in messages %}<s>{{ m.role }}\n"
    "{{ m.content.split('<tool>')[-1].lstrip('\n') if '<tool>' in m.content else m.content | trim }}</s>{% endfor %}"
)
CONTROL = ("<s>", "</s>", "<tool>")
FRAGMENTS = [
    "<s>",
    "</s>",
    "<tool>",
    "<other>",
    "<",
    "s",
    ">",
    "</",
    "<s",
    "s>",
    " ",
    "\n",
    "bot",
    "é",
    "日",
    "\ufdd0",
    "a",
]


def with_control(kind: str, template: str = TURNS, *more: AddedToken) -> Tokenizer:
    backend = KINDS[kind]()
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in CONTROL[:2]])
    backend.add_tokens([AddedToken(name, normalized=False) for name in ("<tool>", "<other>")])
    backend.add_special_tokens([token for token in more if token.special])
    backend.add_tokens([token for token in more if not token.special])
    return make(backend, chat_template=template)


def ids_of(tokenizer: Tokenizer, *messages: dict, **options) -> list[int]:
    return tokenizer.encode_chat(tokenizer.render_data(list(messages), **options))


def control(tokenizer: Tokenizer, ids: list[int], names: tuple[str, ...] = CONTROL) -> list[str]:
    return [piece for piece in tokenizer.pieces(ids) if piece in names]


def shuffled(rng: random.Random) -> str:
    return "".join(rng.choices(FRAGMENTS, k=rng.randint(1, 12)))


@pytest.mark.parametrize("kind", KINDS)
def test_no_text_writes_a_control_token(kind: str):
    tokenizer, rng = with_control(kind), random.Random(kind)
    for _ in range(100):
        message = {"role": rng.choice(["user", "tool"]), "name": shuffled(rng), "content": shuffled(rng)}
        tools = [{"name": shuffled(rng), shuffled(rng): [shuffled(rng)]}]
        ids = ids_of(tokenizer, message, message, tools=tools, end=shuffled(rng))
        assert control(tokenizer, ids) == ["<s>", "</s>"] * 2 + ["<tool>", "<s>"], (message, tools)


@pytest.mark.parametrize("kind", ["byte_level", "byte_level_in_steps"])
def test_the_text_stays_what_it_is(kind: str):
    tokenizer, rng = with_control(kind), random.Random(1)
    for _ in range(100):
        message = {"role": "user", "content": shuffled(rng)}
        ids = ids_of(tokenizer, message)
        assert tokenizer.decode(ids, skip_special_tokens=False) == tokenizer.render_chat([message])


@pytest.mark.parametrize("kind", KINDS)
def test_texts_without_control_tokens_are_encoded_as_ever(kind: str):
    tokenizer, rng = with_control(kind), random.Random(2)
    for _ in range(30):
        said = "".join(rng.choices([each for each in FRAGMENTS if each not in CONTROL], k=6))
        if any(name in said for name in CONTROL):
            continue
        chat = tokenizer.render_data([{"role": "user", "content": said}])
        assert chat == MarkedText(tokenizer.render_chat([{"role": "user", "content": said}]))
        assert tokenizer.encode_chat(chat) == tokenizer.encode(chat.text, special_tokens=False)


def test_an_answer_may_hold_the_tokens_that_its_text_shows():
    tokenizer = with_control("byte_level")
    said = "<tool>x</s>"
    assert control(tokenizer, ids_of(tokenizer, {"role": "assistant", "content": said})) == [
        "<s>", "<tool>", "</s>", "<s>",
    ]  # fmt: skip
    assert control(tokenizer, ids_of(tokenizer, {"role": "user", "content": said})) == ["<s>", "</s>", "<s>"]


def test_a_template_that_takes_texts_apart():
    """A mark that is left alone divides the text, and never hides what the template writes."""
    tokenizer = with_control("byte_level", THOUGHTS)
    for said in ("<tool>a", "a<tool>", "<tool>", "<<tool>s>", "<s<tool>>", "</s><tool></s>", "<tool><s><tool>"):
        ids = ids_of(tokenizer, {"role": "user", "content": said}, add_generation_prompt=False)
        assert control(tokenizer, ids) == ["<s>", "</s>"], said
        assert not set("\ufdd0\ufdd1") & set(tokenizer.decode(ids, skip_special_tokens=False)), said


def test_names_that_overlap_and_names_in_names():
    more = [AddedToken(name, special=True, normalized=False) for name in ("<a>", "><b", "<a><b>!", "a>", "<<a>>")]
    names = (*CONTROL, *(str(each.content) for each in more))
    tokenizer, rng = with_control("byte_level", TURNS, *more), random.Random(3)
    for _ in range(300):
        said = "".join(rng.choices(["<", "a", ">", "b", "!", "<a>", "><b", "<s>"], k=rng.randint(2, 10)))
        ids = ids_of(tokenizer, {"role": "user", "content": said})
        assert control(tokenizer, ids, names) == ["<s>", "</s>", "<s>"], said
        assert f"\n{said}</s>" in tokenizer.decode(ids, skip_special_tokens=False)


def test_tokens_that_take_spaces_along_or_are_found_in_normalised_text():
    backend = byte_level()
    backend.normalizer = normalizers.Lowercase()
    backend.add_special_tokens([AddedToken("<mask>", special=True, lstrip=True, rstrip=True, normalized=True)])
    tokenizer = make(backend, chat_template="{% for m in messages %}<mask>{{ m.content }}{% endfor %}")
    for said in ("a  <mask>  b", "a <MASK>", "<MaSk><mask>", " <mask>"):
        ids = ids_of(tokenizer, {"role": "user", "content": said})
        assert control(tokenizer, ids, ("<mask>",)) == ["<mask>"], said


def test_a_name_of_one_letter_cannot_be_spelled_otherwise():
    tokenizer = with_control("byte_level", TURNS, AddedToken("§", special=True, normalized=False))
    with pytest.raises(InvalidField, match=r"'§'.*allow_control_tokens"):
        ids_of(tokenizer, {"role": "user", "content": "§ 1"})


def test_texts_that_hold_the_marks_themselves():
    tokenizer = with_control("byte_level")
    said = "".join(chr(code) for code in range(0xFDD0, 0xFDEE)) + "</s>"
    ids = ids_of(tokenizer, {"role": "user", "content": said})
    assert control(tokenizer, ids) == ["<s>", "</s>", "<s>"]
    assert said in tokenizer.decode(ids, skip_special_tokens=False)
    for more in ("\ufdee", "\ufdee\ufdef"):
        with pytest.raises(InvalidField, match="U\\+FDD0"):
            ids_of(tokenizer, {"role": "user", "content": said + more})


def test_a_continued_message_and_special_tokens_around():
    tokenizer = with_control("byte_fallback")
    chat = [{"role": "user", "content": "<s>"}, {"role": "assistant", "content": "so </s>: "}]
    found = tokenizer.render_data(chat, continue_final_message=True, add_generation_prompt=False)
    assert found.plain.endswith("so </s>: ")
    ids = tokenizer.encode_chat(found, special_tokens=True)
    head, tail = tokenizer.leading_special_ids, tokenizer.trailing_special_ids
    assert ids == [*head, *tokenizer.encode_chat(found), *tail]
    assert control(tokenizer, ids[len(head) : -len(tail)]) == ["<s>", "</s>", "<s>"]


@pytest.mark.parametrize("kind", KINDS)
def test_texts_behind_a_prompt_write_no_control_token(kind: str):
    """As documents of a rerank template, whose own tokens stay."""
    tokenizer, rng = with_control(kind), random.Random(kind)
    tokens = tokenizer.control_tokens("<tool> <s>")
    for prompt in ("<s>D: ", "<Document>: ", "", "<tool>\n"):
        texts = [shuffled(rng) for _ in range(60)]
        own = control(tokenizer, tokenizer.encode(prompt, special_tokens=False))
        for text, ids in zip(texts, tokens.encode_behind(prompt, texts), strict=True):
            assert control(tokenizer, ids) == own, (prompt, text)
            if not any(name in text for name in CONTROL):
                assert ids == tokenizer.encode(prompt + text, special_tokens=False)
            elif kind.startswith("byte_level"):
                assert tokenizer.decode(ids, skip_special_tokens=False) == prompt + text


@pytest.mark.parametrize("kind", KINDS)
def test_values_within_a_piece_write_no_control_token(kind: str):
    tokenizer, rng = with_control(kind), random.Random(kind)
    tokens = tokenizer.control_tokens("<tool> <s>")
    for _ in range(60):
        values, marks = tokens.mark_values({"query": shuffled(rng), "instruction": shuffled(rng)})
        piece = f"<s> {values['instruction']} : {values['query']} </s>"
        assert control(tokenizer, tokens.ids(MarkedText(piece, marks))) == ["<s>", "</s>"], values


def test_a_text_that_cannot_be_spelled_is_an_error_beside_the_others():
    tokenizer = with_control("byte_level", TURNS, AddedToken("§", special=True, normalized=False))
    good, bad = tokenizer.control_tokens("").encode_behind("§ ", ["a", "b§"])
    assert good == tokenizer.encode("§ a", special_tokens=False)
    assert isinstance(bad, InvalidField)
    assert "'§'" in bad.problem and bad.problem.endswith("allowed: texts without it")


def test_pieces_that_join_with_whatever_stands_before_them():
    """They are read as if they stood behind other text, and none of that is left in them."""
    backend = byte_level()
    joined = ["\n\n\n b", "aaaa aa", ".... .."]
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator(joined * 9, trainer)
    backend.add_special_tokens(["<s>"])
    tokens = make(backend).control_tokens("")
    for text in ("<s>\n\n", "<s>aa", "<s>..", "<s>\n\na<s>..<s>aa.\n"):
        (ids,) = tokens.encode_behind("", [text])
        assert backend.decode(ids, skip_special_tokens=False) == text
        assert backend.token_to_id("<s>") not in ids
