"""Linears of a body as int8, and what that may cost in accuracy before a model is not served so."""

from __future__ import annotations

from typing import Any

import torch

from pyruntime.errors import ModelLoadError
from pyruntime.model.linear import OwnLinear, let_go
from pyruntime.model.probe import eager_attention
from pyruntime.ops.quantized import COLUMNS, linear_int8, pack_int8

# Least mean over hidden rows of the cosine with what they were before. MiniLM's stays at 0.999, those of random models
# of experts, where single tokens are sent elsewhere, above 0.99; below this a model answers something else.
LEAST_COSINE = 0.95
NUM_TOKENS = 64
# Routers of experts: small, and the smallest of changes sends a token elsewhere.
LEFT_ALONE = ("gate", "router")


class QuantizedLinear(OwnLinear):
    """``torch.nn.Linear`` whose weights are int8, in ``packed`` alone: ``weight`` tells shape and dtype, no values."""

    packed: torch.Tensor

    @property
    def matrix(self) -> torch.Tensor:
        return self.packed

    def product(self, x: torch.Tensor, activation: str = "none", up: OwnLinear | None = None) -> torch.Tensor:
        return self._product(x, self.packed, self.out_features, up.matrix if up is not None else None, activation)

    def gated_halves(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        gate, up = self.packed.chunk(2)
        return self._product(x, gate, self.out_features // 2, up, activation)

    def _product(
        self, x: torch.Tensor, w: torch.Tensor, columns: int, up: torch.Tensor | None, activation: str
    ) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        return linear_int8(rows, w, columns, self.bias, up, activation).view(*x.shape[:-1], columns)


@torch.inference_mode()
def quantize(model: Any, offset: int) -> None:
    """The linears of a body on a CPU become int8, and their weights are let go.

    Everything that the packed forward replaces has been by then. Embeddings, heads, experts in one tensor and routers
    stay as they are. Raises ``ModelLoadError`` for a model that has no such linears, or whose hidden rows change too
    much. ``offset``: entries of its position table that no token uses.
    """
    chosen = [module for name, module in model.base_model.named_modules() if _is_chosen(name, module)]
    if not chosen:
        raise ModelLoadError("quantization int8: it has no linear layers to quantise")
    before = _rows(model, offset)
    for module in chosen:
        _quantize_one(module)
    after = _rows(model, offset)
    cosine = torch.nn.functional.cosine_similarity(before.double(), after.double(), dim=-1).mean().item()
    if not cosine >= LEAST_COSINE:
        problem = f"mean cosine of hidden rows with those before {cosine:.4f}, allowed {LEAST_COSINE}"
        raise ModelLoadError(f"quantization int8 changes its answers too much ({problem})")


def _is_chosen(name: str, module: torch.nn.Module) -> bool:
    if not isinstance(module, OwnLinear) or name.rpartition(".")[2] in LEFT_ALONE:
        return False
    # Both halves have whole panels, or it cannot be cut.
    return not name.endswith("gate_up_proj") or module.out_features % (2 * COLUMNS) == 0


def _quantize_one(module: Any) -> None:
    try:
        packed = pack_int8(module.weight)
    except ValueError as error:
        raise ModelLoadError(f"quantization int8: {error}") from error
    row_invariant = module.row_invariant
    module.__class__ = QuantizedLinear
    module.row_invariant = row_invariant
    module.register_buffer("packed", packed, persistent=False)
    let_go(module)


def _rows(model: Any, offset: int) -> torch.Tensor:
    """Hidden rows [T, H] of a text of random tokens, by transformers' own forward."""
    named = getattr(model.config, "max_position_embeddings", None) or NUM_TOKENS
    size = max(1, min(NUM_TOKENS, named - offset))
    vocab_size = model.base_model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(min(3, vocab_size - 1), vocab_size, (1, size), generator=torch.Generator().manual_seed(0))
    with eager_attention(model):
        rows: torch.Tensor = model.base_model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0]
    return rows
