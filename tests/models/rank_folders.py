"""Small random models that rank, in folders that transformers writes, served over a real channel."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import torch
from tokenizers import AddedToken, Regex, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from transformers import AutoConfig, PreTrainedTokenizerFast

from pyruntime.config import Settings
from pyruntime.registry import ServedModel
from pyruntime.serving import load_served_model
from pyruntime.v1 import score_pb2, score_pb2_grpc
from tests.models.lent import serving
from tests.models.texts import text

# How the tokenizers of Qwen cut a text before they merge bytes.
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
}
QUERY = "which river grows in winter?"
DOCUMENTS = [text(seed, 1 + 7 * seed) for seed in range(9)]
DOCUMENTS += ['  two\n\nlines: "yes" ', "naïve 日本 — ☃!", "</think> 7", text(1, 8)]


def byte_level_tokenizer(folder: Path, *, starts: bool = False) -> PreTrainedTokenizerFast:
    """Bytes merged as Qwen's tokenizers do; <bos> is put before a text where ``starts``."""
    backend = Backend(models.BPE())
    split = pre_tokenizers.Split(Regex(QWEN_SPLIT), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    corpus = [text(seed, 60) for seed in range(20)] + ["yes\nno\nYes\nNo\n<Query>: <Document>: A: B: assistant"] * 9
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, special_tokens=["<bos>", "<pad>"])
    backend.train_from_iterator(corpus, trainer)
    backend.add_special_tokens([AddedToken(name, special=True) for name in ("<|im_start|>", "<|im_end|>")])
    if starts:
        backend.post_processor = processors.TemplateProcessing(
            single="<bos> $A", pair="<bos> $A <bos>:1 $B:1", special_tokens=[("<bos>", 0)]
        )
    names = {"bos_token": "<bos>"} if starts else {}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<|im_end|>", **names)
    tokenizer.save_pretrained(folder)
    return tokenizer


def save_model(folder: Path, factory: Any, model_type: str, vocab_size: int, **fields: Any) -> None:
    """Weights large enough that a wrong token, position or row shows."""
    torch.manual_seed(0)
    model = factory.from_config(AutoConfig.for_model(model_type, vocab_size=vocab_size, **(SMALL | fields))).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(3.0)
        elif parameter.abs().max() == 0:
            parameter.data.normal_(0, 0.1)
    model.save_pretrained(folder)


def eager(folder: Path, factory: Any) -> Any:
    """transformers' own model in float32: the independent reference."""
    return factory.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def logits_of(model: Any, ids: list[int]) -> torch.Tensor:
    """Of one sequence, float64."""
    return model(torch.tensor([ids])).logits[0].double()


def rerank(*documents: str, **fields: Any) -> score_pb2.RerankRequest:
    return score_pb2.RerankRequest(**{"query": QUERY, "documents": documents} | fields)


def by_index(answer: score_pb2.RerankResponse) -> list[float]:
    """The scores of all documents, in the order of the request."""
    assert not answer.errors
    scores = [each.score for each in answer.results]
    assert scores == sorted(scores, reverse=True)
    return [each.score for each in sorted(answer.results, key=lambda each: each.index)]


def load(folder: Path, **settings: Any) -> ServedModel:
    options = {"dtype": "float32", "kv_cache_bytes": 2**24, "max_batch_tokens": 256} | settings
    return load_served_model("small", str(folder), Settings(**options), lambda _: None)


@contextlib.asynccontextmanager
async def channel_to(model: ServedModel, **settings: Any) -> AsyncIterator[score_pb2_grpc.ScoreServiceStub]:
    """A client of a server that has this one model."""
    lent = serving({"small": model}, Settings(port=0, **settings))
    async with lent as (server, _), grpc.aio.insecure_channel(server.address) as channel:
        yield score_pb2_grpc.ScoreServiceStub(channel)
