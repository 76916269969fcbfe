"""Pairs put together here against the tokenizers' own way of encoding two texts."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from pyruntime.tokenization import Tokenizer

WORDS = "what is a panda the giant sleeps eats bamboo é in ! ? . , river of stone"
PAIRS = [
    ("what is a panda?", "the giant panda eats bamboo."),
    ("é", "é"),
    ("  what  is ", " the river of stone "),
    ("panda", "what is é? " * 40),
    ("unknown ☃", "of\n\nstone\t!"),
]
SPECIAL = ["[UNK]", "<s>", "</s>"]


def word_piece() -> Backend:
    backend = Backend(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.train_from_iterator([WORDS] * 3, trainers.WordPieceTrainer(vocab_size=90, special_tokens=SPECIAL))
    return backend


def byte_level() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=SPECIAL, initial_alphabet=alphabet)
    backend.train_from_iterator([WORDS] * 3, trainer)
    return backend


def metaspace() -> Backend:
    pieces = [*SPECIAL, "▁", *sorted(set(WORDS) - {" "})]
    backend = Backend(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    return backend


def template(pair: str) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(single="<s> $A </s>", pair=pair, special_tokens=[("<s>", 1), ("</s>", 2)])


BACKENDS = {"word_piece": word_piece, "byte_level": byte_level, "metaspace": metaspace}
FRAMES = {
    "bert": lambda: processors.BertProcessing(("</s>", 2), ("<s>", 1)),
    "roberta": lambda: processors.RobertaProcessing(("</s>", 2), ("<s>", 1), trim_offsets=True, add_prefix_space=False),
    "template": lambda: template("<s> $A </s> $B:1 </s>:1"),
    "start_alone": lambda: template("<s> $A <s>:1 $B:1"),
    "sequence": lambda: processors.Sequence([processors.ByteLevel(), template("$A </s> $B </s>")]),
}


def make(backend: Backend, **options: object) -> Tokenizer:
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, **options))


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("frame", FRAMES)
def test_a_joined_pair_is_what_the_tokenizer_makes_of_two_texts(kind: str, frame: str) -> None:
    backend = BACKENDS[kind]()
    backend.post_processor = FRAMES[frame]()
    tokenizer = make(backend, model_input_names=["input_ids", "token_type_ids"])
    own = tokenizer.pair_frame
    assert own is not None
    for first, second in PAIRS:
        expected = tokenizer._hf(first, second)
        ids = [tokenizer.encode(text, special_tokens=False) for text in (first, second)]
        assert own.join(*ids) == expected["input_ids"]
        assert own.types(*map(len, ids)) == expected["token_type_ids"]
        assert len(expected["input_ids"]) == own.num_special + len(ids[0]) + len(ids[1])


@pytest.mark.parametrize("processor", [None, template("<s> $A $B </s>")], ids=["none", "nothing between"])
def test_a_tokenizer_that_runs_texts_together_takes_no_pairs(processor: object) -> None:
    backend = word_piece()
    if processor is not None:
        backend.post_processor = processor
    assert make(backend).pair_frame is None


def test_token_types_are_for_tokenizers_that_name_them() -> None:
    assert make(word_piece(), model_input_names=["input_ids", "token_type_ids"]).reads_token_types
    assert not make(word_piece(), model_input_names=["input_ids", "attention_mask"]).reads_token_types


def test_leading_special_ids_are_those_before_a_text() -> None:
    backend = word_piece()
    backend.post_processor = template("<s> $A </s> $B </s>")
    tokenizer = make(backend)
    assert tokenizer.leading_special_ids == [1]
    tokenizer.leading_special_ids.append(7)
    assert tokenizer.leading_special_ids == [1]
