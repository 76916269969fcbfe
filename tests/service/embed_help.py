"""Models with other kinds of embeddings than dense ones, and what the fake engine makes of them."""

from __future__ import annotations

from typing import Any

from pyruntime.registry import ServedModel
from pyruntime.types import Capability, EmbeddingKind, EmbedRequest, PoolingType
from tests.fakes import fake_model, values_of
from tests.service.conftest import Stack

WIDTH = 6


def serve(stack: Stack, name: str, capabilities: set[Capability], **facts: object) -> ServedModel:
    model = fake_model(name, capabilities, token_embedding_dimensions=WIDTH, **facts)
    stack.registry.declare(name)
    stack.registry.set_serving(name, model)
    return model


def fake_values(ids: list[int], kind: EmbeddingKind, dimensions: int = WIDTH) -> Any:
    return values_of(ids, EmbedRequest([], PoolingType.MEAN, True, dimensions, kind=kind))
