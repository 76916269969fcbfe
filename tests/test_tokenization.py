"""Tokenizer and incremental detokenizer against transformers, for each way of spelling bytes."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from pyruntime.detokenization import MAX_HELD_BYTES, IncrementalDetokenizer
from pyruntime.errors import CapabilityMissing, InvalidField, ModelLoadError
from pyruntime.tokenization import Tokenizer
from tests.tokenizer_kinds import KINDS, byte_fallback, byte_level, make, word_piece

TEXT = "Hello  world! Don't stop. 🙂🏳️‍🌈 é e\u0301 日本語 ᚠᛇᚻ a\u200db\n\n  end \ufffd x"


@pytest.fixture(params=list(KINDS))
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return make(KINDS[request.param]())


def whole(tokenizer: Tokenizer, ids: list[int], skip: bool) -> str:
    return tokenizer._hf.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)


def pushed(tokenizer: Tokenizer, ids: list[int], skip: bool = True) -> list[str]:
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip)
    return [detokenizer.push(i) for i in ids] + [detokenizer.flush()]


@pytest.mark.parametrize("skip", [True, False])
def test_a_text_comes_back_as_one_decode_gives_it(tokenizer: Tokenizer, skip: bool) -> None:
    ids = tokenizer.encode(TEXT)
    assert (
        "".join(pushed(tokenizer, ids, skip))
        == whole(tokenizer, ids, skip)
        == tokenizer.decode(ids, skip_special_tokens=skip)
    )


@pytest.mark.parametrize("skip", [True, False])
def test_random_ids_come_back_as_one_decode_gives_them(tokenizer: Tokenizer, skip: bool) -> None:
    """Broken UTF-8, special tokens anywhere, ids that no token has: whatever a model may draw."""
    draw = random.Random(0)
    for _ in range(300):
        ids = [draw.randrange(tokenizer.vocab_size + 2) for _ in range(draw.randrange(1, 24))]
        assert "".join(pushed(tokenizer, ids, skip)) == whole(tokenizer, ids, skip), ids


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_no_piece_ends_inside_a_code_point(kind: str) -> None:
    tokenizer = make(KINDS[kind]())
    text = "a🙂b日本語é"
    pieces = pushed(tokenizer, tokenizer.encode(text))
    assert "".join(pieces).strip() == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_byte_level_text_streams_as_soon_as_a_code_point_is_whole() -> None:
    tokenizer = make(byte_level())
    alphabet = {character: tokenizer._backend.token_to_id(character) for character in "ðŁĻĤ"}
    assert pushed(tokenizer, list(alphabet.values())) == ["", "", "", "🙂", ""]


def test_an_unfinished_code_point_comes_out_at_the_end() -> None:
    tokenizer = make(byte_level())
    first = tokenizer._backend.token_to_id("ð")
    assert pushed(tokenizer, [first]) == ["", "\ufffd"]


def test_a_genuine_replacement_character_is_not_held_back() -> None:
    tokenizer = make(byte_level())
    ids = tokenizer.encode("\ufffd")
    pieces = pushed(tokenizer, ids)
    assert pieces[-2:] == ["\ufffd", ""]


def byte_ids(tokenizer: Tokenizer, raw: bytes) -> list[int]:
    return [tokenizer._backend.token_to_id(f"<0x{byte:02X}>") for byte in raw]


def test_a_run_of_bytes_that_is_no_utf8_is_replaced_byte_by_byte() -> None:
    tokenizer = make(byte_fallback(strip=False))
    ids = [*byte_ids(tokenizer, "é".encode() + b"\xff"), *tokenizer.encode("a", special_tokens=False)]
    assert "".join(pushed(tokenizer, ids)) == whole(tokenizer, ids, True)
    assert "".join(pushed(tokenizer, ids)).startswith("\ufffd" * 3)


@pytest.mark.parametrize("offset", range(4))
def test_a_long_run_of_bytes_is_not_held_for_ever(offset: int) -> None:
    tokenizer = make(byte_fallback(strip=False))
    ids = byte_ids(tokenizer, b"a" * offset + "🙂".encode() * 40)
    detokenizer = tokenizer.detokenizer()
    out, longest_wait, wait = "", 0, 0
    for token_id in ids:
        text = detokenizer.push(token_id)
        assert "\ufffd" not in text
        out, wait = out + text, 0 if text else wait + 1
        longest_wait = max(longest_wait, wait)
    assert out + detokenizer.flush() == whole(tokenizer, ids, True)
    assert longest_wait < MAX_HELD_BYTES


def test_a_long_broken_run_goes_on_and_ends() -> None:
    tokenizer = make(byte_fallback(strip=False))
    ids = [*byte_ids(tokenizer, b"\xff" * 100), *tokenizer.encode("a", special_tokens=False)]
    assert "".join(pushed(tokenizer, ids)) == whole(tokenizer, ids, True)


def test_a_long_run_that_breaks_late_loses_nothing_but_the_broken_rest() -> None:
    """The one case that differs from a whole decode, which would take the text before back."""
    tokenizer = make(byte_fallback(strip=False))
    ids = [*byte_ids(tokenizer, "🙂".encode() * 10 + b"\xff"), *tokenizer.encode("a", special_tokens=False)]
    out = "".join(pushed(tokenizer, ids))
    assert out.startswith("🙂" * (MAX_HELD_BYTES // 4) + "\ufffd")
    assert out.endswith("\ufffd a")


def test_a_push_costs_the_same_late_in_a_stream() -> None:
    """Counted, not timed: how many ids the window decodes a push, early and late."""
    tokenizer = make(byte_fallback(strip=True))
    counts: list[int] = []

    class Counting:
        decoder = tokenizer._backend.decoder
        id_to_token = staticmethod(tokenizer._backend.id_to_token)

        @staticmethod
        def decode(ids: list[int], **kw: Any) -> str:
            counts.append(len(ids))
            return tokenizer._backend.decode(ids, **kw)

    detokenizer = IncrementalDetokenizer(Counting)
    for token_id in tokenizer.encode("hello world " * 200):
        detokenizer.push(token_id)
    assert len(counts) > 1000
    assert max(counts) <= 4


def test_special_tokens_are_counted_and_optional() -> None:
    tokenizer = make(byte_fallback(strip=True))
    ids = tokenizer.encode("hello")
    assert tokenizer.num_special == 2
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.encode("hello", special_tokens=False) == ids[1:-1]
    assert tokenizer.special_token_ids == {0, 1, 2}


def test_a_batch_is_its_texts_alone(tokenizer: Tokenizer) -> None:
    texts = ["hello world", TEXT, "a", "the stream " * 50]
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]
    expected = tokenizer._hf(texts, padding=False, truncation=False)["input_ids"]
    assert tokenizer.encode_batch(texts) == expected


def test_truncation_keeps_the_special_tokens_and_one_end() -> None:
    tokenizer = make(word_piece())
    ids = tokenizer.encode("hello world, don't stop the stream")
    inner = ids[1:-1]
    assert tokenizer.truncate(ids, 6, "head") == [ids[0], *inner[:4], ids[-1]]
    assert tokenizer.truncate(ids, 6, "tail") == [ids[0], *inner[-4:], ids[-1]]
    assert tokenizer.truncate(ids, len(ids), "head") == ids
    assert tokenizer.truncate(inner, 4, "tail") == inner[-4:]
    with pytest.raises(InvalidField, match="at least 3"):
        tokenizer.truncate(ids, 2, "head")


def test_a_tokenizer_file_that_truncates_and_pads_does_neither_here() -> None:
    backend = word_piece()
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    tokenizer = make(backend)
    assert len(tokenizer.encode("hello world, don't stop")) > 4
    assert len(tokenizer.encode("a")) == 3


def test_many_threads_encode_at_once(tokenizer: Tokenizer) -> None:
    texts = [f"{TEXT} {i}" for i in range(200)]
    expected = [tokenizer.encode(text) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(tokenizer.encode, texts)) == expected


def test_pieces_are_the_vocabulary_entries() -> None:
    tokenizer = make(byte_fallback(strip=True))
    ids = tokenizer.encode("hello")
    assert tokenizer.pieces(ids) == ["<s>", "▁", "hell", "o", "</s>"]
    assert tokenizer.pieces([10**6]) == [""]


def test_chat_follows_the_models_own_template() -> None:
    turns = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    template = turns + "{% if add_generation_prompt %}[bot]{% endif %}"
    tokenizer = make(byte_level(), chat_template=template)
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.render_chat(messages) == "[user] hi\n[bot]"
    assert tokenizer.render_chat(messages, add_generation_prompt=False) == "[user] hi\n"


def test_no_template_is_a_missing_capability() -> None:
    with pytest.raises(CapabilityMissing, match="chat template"):
        make(byte_level()).render_chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    "template",
    ["{{ raise_exception('roles must alternate') }}", "{{ messages[5].content.x }}", "{{ ''.__class__.mro() }}"],
)
def test_what_a_template_raises_is_the_callers_field(template: str) -> None:
    """The last of them tries to leave the sandbox."""
    with pytest.raises(InvalidField) as refused:
        make(byte_level(), chat_template=template).render_chat([{"role": "user", "content": "hi"}])
    assert refused.value.field == "chat"


def test_a_slow_tokenizer_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="fast"):
        Tokenizer(object())


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Any) -> None:
    with pytest.raises(ModelLoadError):
        Tokenizer.from_pretrained(tmp_path)
