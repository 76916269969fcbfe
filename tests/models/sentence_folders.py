"""Small random models in folders that sentence-transformers writes itself, and the same texts through both."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForTextEncoding,
    PreTrainedTokenizerFast,
)

from pyruntime.config import Settings
from pyruntime.registry import ServedModel
from pyruntime.serving import load_served_model
from pyruntime.types import EmbeddingKind, EmbedRequest, ModelInfo
from tests.models.texts import WORDS, text

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
VOCABULARY = [*SPECIAL, *dict.fromkeys(WORDS), *".,!?;:", "query", "[Q] ", "[D] "]
COMMON = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
BERT = ("bert", COMMON)
GEMMA = (
    "gemma3_text",
    COMMON
    | {"num_key_value_heads": 2, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 24}
    | {"use_bidirectional_attention": True, "eos_token_id": 3, "bos_token_id": 2},
)
T5 = (
    "t5",
    {"vocab_size": len(VOCABULARY), "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}
    | {"pad_token_id": 0, "eos_token_id": 3, "decoder_start_token_id": 0},
)
MODERN = (
    "modernbert",
    COMMON
    | {"num_hidden_layers": 3, "global_attn_every_n_layers": 3, "local_attention": 48, "cls_token_id": 2}
    | {"sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3},
)
MPNET = ("mpnet", COMMON | {"max_position_embeddings": 130})
QWEN3 = ("qwen3", COMMON | {"num_key_value_heads": 2, "head_dim": 16, "eos_token_id": 3, "bos_token_id": 2})
# Lengths from one word to beyond every limit used below.
TEXTS = [text(seed, words) for seed, words in enumerate((1, 2, 3, 5, 8, 13, 21, 34, 55, 90))]
TEXTS += ["The quiet river, between two cities!", "unknown zebra words", "light light light"]


def save_tokenizer(folder: Path, ends_alone: bool = False, model_max_length: int = 64) -> PreTrainedTokenizerFast:
    """Whole words, lower case; [CLS] text [SEP], or text [SEP] where ``ends_alone``."""
    vocabulary = {word: index for index, word in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    single = "$A [SEP]" if ends_alone else "[CLS] $A [SEP]"
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    if ends_alone:
        names["eos_token"] = "[SEP]"
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, mask_token="[MASK]", model_max_length=model_max_length, **names
    )
    fast.save_pretrained(folder)
    return fast


def save_body(folder: Path, kind: tuple[str, dict[str, Any]], factory: Any = AutoModel) -> None:
    """A random body whose weights are large enough that a wrong row, mask or position shows."""
    torch.manual_seed(0)
    model_type, fields = kind
    model = factory.from_config(AutoConfig.for_model(model_type, **fields)).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(4.0)
        elif "bias" in name:
            parameter.data.normal_(std=0.3)
    model.save_pretrained(folder)


def body_folder(
    folder: Path, kind: tuple[str, dict[str, Any]] = BERT, ends_alone: bool = False, **options: Any
) -> Path:
    """Tokenizer and body, as transformers writes them."""
    factories = {"qwen3": AutoModelForCausalLM, "t5": AutoModelForTextEncoding}
    save_tokenizer(folder, ends_alone, **options)
    save_body(folder, kind, factories.get(kind[0], AutoModel))
    return folder


def masked_lm_folder(folder: Path, model_type: str, fields: dict[str, Any]) -> Path:
    save_tokenizer(folder)
    save_body(folder, (model_type, fields), AutoModelForMaskedLM)
    return folder


def serve(folder: Path, **settings: Any) -> ServedModel:
    options = {"dtype": "float32", "kv_cache_bytes": 2**23} | settings
    return load_served_model("small", str(folder), Settings(**options), lambda _: None)


def request(info: ModelInfo, ids: list[list[int]], **options: Any) -> EmbedRequest:
    """Of the model's own kind, pooling, width and normalisation, unless ``options`` say otherwise."""
    kind = options.pop("kind", EmbeddingKind.DENSE)
    per_token = kind is EmbeddingKind.PER_TOKEN
    chosen = {
        "pooling": info.default_pooling,
        "normalize": info.normalize_default,
        "dimensions": info.token_embedding_dimensions if per_token else info.embedding_dimensions,
        "kind": kind,
    }
    return EmbedRequest(ids, **(chosen | options))


def tokenized(model: ServedModel, texts: list[str], prompt: str = "") -> list[list[int]]:
    """As the service does it: the prompt before the text, cut at the model's own limit."""
    limit = model.info.context_length
    return [model.tokenizer.truncate(ids, limit, "head") for ids in model.tokenizer.encode_batch(_with(prompt, texts))]


def _with(prompt: str, texts: list[str]) -> list[str]:
    return [prompt + each for each in texts]


async def embed(model: ServedModel, ids: list[list[int]], **options: Any) -> list[Any]:
    """The values of each input, which go in as requests of three."""
    groups = [ids[start : start + 3] for start in range(0, len(ids), 3)]
    answers = await asyncio.gather(*(model.engine.embed(request(model.info, group, **options)) for group in groups))
    return [result.values for results, _ in answers for result in results]


def least_cosine(own: list[Any], reference: Any) -> float:
    """Over all vectors; shapes must agree."""
    least = 1.0
    for ours, theirs in zip(own, reference, strict=True):
        ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
        assert ours.shape == theirs.shape
        norms = np.linalg.norm(ours, axis=-1) * np.linalg.norm(theirs, axis=-1)
        least = min(least, float(((ours * theirs).sum(-1) / norms).min(initial=1.0)))
    return least
