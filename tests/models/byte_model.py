"""A small random decoder of bytes, saved with its tokenizer, and served over a real channel."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pyruntime.registry import ServedModel
from pyruntime.v1 import generate_pb2_grpc
from tests.fakes import EOS, byte_tokenizer
from tests.models.lent import serving

CONTEXT = 512


def save_byte_model(folder: Path, context: int = CONTEXT) -> Path:
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=260,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=context,
        bos_token_id=256,
        eos_token_id=EOS,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    byte_tokenizer()._hf.save_pretrained(folder)
    return folder


@contextlib.asynccontextmanager
async def channel_to(model: ServedModel) -> AsyncIterator[generate_pb2_grpc.GenerateServiceStub]:
    """A server of its own for the model, which stays loaded."""
    models = {model.info.name: model}
    async with serving(models) as (server, _), grpc.aio.insecure_channel(server.address) as channel:
        yield generate_pb2_grpc.GenerateServiceStub(channel)
