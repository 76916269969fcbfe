"""A small tokenizer for each way of spelling text that fast tokenizers have."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from pyruntime.tokenization import Tokenizer

CORPUS = ["hello world, don't stop the stream of tokens", "a cache holds blocks. the end!", "日本語 é"] * 3
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens([AddedToken("<|end|>", special=True)])
    backend.add_tokens([AddedToken("<日本>", normalized=False)])
    return backend


def byte_fallback(strip: bool) -> Backend:
    pieces = ["<unk>", "<s>", "</s>", *BYTE_TOKENS, "▁", *"abcdehilnoprstw!.'", "he", "ll", "hell", "▁w", "▁s", "é"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("▁", "w"), ("▁", "s")]
    backend = Backend(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return backend


def word_piece() -> Backend:
    backend = Backend(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=120, special_tokens=["[UNK]", "[CLS]", "[SEP]"])
    backend.train_from_iterator(CORPUS, trainer)
    backend.decoder = decoders.WordPiece()
    backend.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    return backend


def metaspace() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=80, special_tokens=["<s>"]))
    return backend


def unigram(byte_fallback: bool) -> Backend:
    """As of T5: SentencePiece's other model. With fallback as of XGLM's successors."""
    pieces = ["</s>", "<unk>", "▁", "▁h", "ell", "o", "▁wor", "ld", "▁s", "top", "e", "n", "d", "!", "日", "é", "\n"]
    pieces += BYTE_TOKENS if byte_fallback else []
    backend = Backend(models.Unigram([(piece, -1.0 - i) for i, piece in enumerate(pieces)], 1, byte_fallback))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    steps: list[Any] = [decoders.ByteFallback(), decoders.Metaspace()]
    backend.decoder = decoders.Sequence(steps) if byte_fallback else decoders.Metaspace()
    backend.add_special_tokens(["</s>", "<unk>"])
    backend.add_tokens([AddedToken("<extra 0>", normalized=False)])
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 0)])
    return backend


def end_of_word() -> Backend:
    """As of the first GPT: the last piece of a word is marked, and text ends without a space."""
    backend = Backend(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.BPEDecoder()
    options: dict[str, Any] = {"special_tokens": ["<unk>"], "end_of_word_suffix": "</w>"}
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=100, **options))
    return backend


def byte_level_in_steps() -> Backend:
    backend = byte_level()
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    return backend


def no_decoder() -> Backend:
    backend = metaspace()
    backend.decoder = None
    return backend


KINDS = {
    "byte_level": byte_level,
    "byte_level_in_steps": byte_level_in_steps,
    "byte_fallback_stripped": lambda: byte_fallback(strip=True),
    "byte_fallback": lambda: byte_fallback(strip=False),
    "word_piece": word_piece,
    "metaspace": metaspace,
    "unigram": lambda: unigram(byte_fallback=False),
    "unigram_fallback": lambda: unigram(byte_fallback=True),
    "end_of_word": end_of_word,
    "no_decoder": no_decoder,
}


def make(backend: Backend, **options: Any) -> Tokenizer:
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, **options))
