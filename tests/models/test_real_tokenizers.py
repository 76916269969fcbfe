"""Text one token at a time through the tokenizers of real models, against one decode of all by transformers."""

from __future__ import annotations

import random

import pytest
from transformers import AutoTokenizer

from pyruntime.tokenization import Tokenizer

PIECES = [
    *["Hello", " world", "\n\n", "\t", "  ", "don't", " 3.14", "def f(x):\n    return x", "<b>", "ﬁ", "\x00", "\u200b"],
    *["日本語", "é", "e\u0301\u0323", "क्षि", "ᚠᛇᚻ", "שלום", "مرحبا\u064b", "\u202eabc\u202c", "𝔘", "ß", "\ufffd", "ꙮ"],
    *[
        "🙂",
        "👩\u200d🔬",
        "🏳️\u200d🌈",
        "👍🏽",
        "🇩🇪",
        "<bos>",
        "<eos>",
        "<0x41>",
        "▁",
        "##ing",
        "[SEP]",
        "<start_of_turn>",
    ],
]
# Longer runs of byte tokens are given out before they end, and then can differ from a decode of all.
MOST_WILD = 30


@pytest.mark.parametrize("name", ["gemma-3-270m", "all-minilm-l6-v2"])
def test_a_thousand_texts(folders, name):
    reference = AutoTokenizer.from_pretrained(folders[name])
    tokenizer, draw = Tokenizer(reference), random.Random(name)
    byte_ids = [i for i in (reference.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in range(256)) if i]
    for number in range(1000):
        ids = tokenizer.encode("".join(draw.choices(PIECES, k=draw.randrange(1, 12))))
        if number % 4 == 0:
            wild = [draw.randrange(tokenizer.vocab_size + 9) for _ in range(draw.randrange(1, MOST_WILD))]
            ids = wild + draw.choices(byte_ids, k=draw.randrange(0, 9)) if number % 8 else ids + wild
        for skip in (True, False)[: 2 - number % 2]:
            whole = reference.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            detokenizer = tokenizer.detokenizer(skip_special_tokens=skip)
            assert "".join([detokenizer.push(each) for each in ids] + [detokenizer.flush()]) == whole, ids
            assert tokenizer.decode(ids, skip_special_tokens=skip) == whole
