"""Modules and layers that one op stands in for: which, and that nothing but rounding changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, BertConfig, BertModel

from pyruntime.model import fused_layers, fusion
from pyruntime.model.attention import IMPLEMENTATION, AttentionContext, attending
from pyruntime.model.kv_cache import KVCache
from pyruntime.model.linear import use_own_linears
from pyruntime.model.packed import run_packed
from pyruntime.model.probe import probe_body

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 50,
    "pad_token_id": 0,
    "sliding_window": 5,
}
WHOLE = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "smollm3")
# Their residuals are scaled, their norms stand elsewhere, their halves run side by side, their MLP is one matrix.
NOT_WHOLE = ("granite", "olmo2", "cohere", "phi3")


def decoder(model_type: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        model_type, **SMALL, **({"residual_multiplier": 0.5} if model_type == "granite" else {})
    )
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=IMPLEMENTATION).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:  # norms and biases begin as constants, which would hide that they are not read
                weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(name))) / 4)
    return model.requires_grad_(False)


def rows_and_cache(model: Any, layers: Any) -> tuple[torch.Tensor, KVCache]:
    batch = fused_layers._batch()
    cache = KVCache({i: traits.shape for i, traits in layers.items()}, 8, fused_layers.BLOCK_SIZE, model.dtype, "cpu")
    return run_packed(model.base_model, batch, AttentionContext(batch, cache), 0, None), cache


@pytest.mark.parametrize("model_type", [*WHOLE, *NOT_WHOLE])
def test_fused_layers_answer_what_plain_ones_do(model_type: str) -> None:
    model = decoder(model_type)
    layers = probe_body(model, "cpu", 0, is_lm=True).layers
    want, wanted_cache = rows_and_cache(model, layers)
    use_own_linears(model, row_invariant=False)
    fusion.fuse(model)
    shapes = {i: traits.shape for i, traits in layers.items()}
    assert fused_layers.fuse_layers(model, shapes, 0) == (2 if model_type in WHOLE else 0)
    got, cache = rows_and_cache(model, layers)
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)
    for layer in layers:
        torch.testing.assert_close(cache.keys[layer], wanted_cache.keys[layer], atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(cache.values[layer], wanted_cache.values[layer], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("row_invariant", [False, True])
def test_many_rows_answer_what_few_do(row_invariant: bool) -> None:
    model = decoder("qwen3", torch.bfloat16)
    layers = probe_body(model, "cpu", 0, is_lm=True).layers
    use_own_linears(model, row_invariant)
    fusion.fuse(model)
    assert fused_layers.fuse_layers(model, {i: traits.shape for i, traits in layers.items()}, 0) == 2
    small, _ = rows_and_cache(model, layers)
    batch = fused_layers._batch()
    batch.input_ids, batch.positions = batch.input_ids.repeat(20), batch.positions.repeat(20)
    many = torch.arange(20)[:, None, None]
    tables = torch.tensor([[0, 1, 2], [3, 0, 0]]) + 4 * many
    lengths = batch.kv_lengths.repeat(20)  # type: ignore[union-attr]
    starts = torch.cat((torch.zeros(1), lengths.cumsum(0))).int()
    pages = tables.view(-1, 3)
    slots = [int(pages[i, p // 4]) * 4 + p % 4 for i, n in enumerate(lengths.tolist()) for p in range(n)]
    batch.query_starts, batch.kv_lengths, batch.block_tables = starts, lengths, pages.int()
    batch.slot_mapping = torch.tensor(slots)
    cache = KVCache({i: traits.shape for i, traits in layers.items()}, 80, 4, model.dtype, "cpu")
    rows = run_packed(model.base_model, batch, AttentionContext(batch, cache), 0, None)
    assert rows.shape[0] == 260
    if row_invariant:
        assert torch.equal(rows.view(20, 13, -1), small.expand(20, -1, -1))
    else:
        torch.testing.assert_close(rows.view(20, 13, -1), small.expand(20, -1, -1), atol=0.1, rtol=0.1)


def kinds(model: torch.nn.Module) -> set[str]:
    return {type(module).__name__ for module in model.modules() if hasattr(module, "fused")}


def test_parts_of_a_bert() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 72}
    config = BertConfig(**sizes, num_hidden_layers=1, hidden_act="gelu", max_position_embeddings=40)
    model = BertModel(config, add_pooling_layer=False).eval().requires_grad_(False)
    ids = torch.randint(50, (1, 9))
    want = model(ids).last_hidden_state
    use_own_linears(model, row_invariant=False)
    fusion.fuse(model)
    assert kinds(model) == {"BertIntermediate", "BertSelfOutput", "BertOutput"}
    plain = model(ids).last_hidden_state
    with attending(AttentionContext(fused_layers._batch())):
        fused = model(ids).last_hidden_state
    torch.testing.assert_close(fused, want, atol=2e-5, rtol=2e-5)
    assert not torch.equal(fused, plain)  # outside of packed forwards transformers' own code runs


def test_a_module_that_only_looks_like_a_norm_is_left_alone() -> None:
    class Centred(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = torch.nn.Parameter(torch.ones(8), requires_grad=False), 1e-6

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.layer_norm(x, (8,), self.weight, None, self.eps)

    class Gate(Centred):
        def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
            return x * gate

    model = torch.nn.Sequential(Centred(), Gate())
    assert fusion.fuse(model) == 0
    assert not kinds(model)


def test_an_activation_is_known_by_what_it_computes() -> None:
    from transformers.activations import ACT2FN

    names = {name: fusion._name_of(ACT2FN[name]) for name in ("gelu", "gelu_pytorch_tanh", "gelu_new", "silu", "relu")}
    assert names == {
        "gelu": "gelu",
        "gelu_pytorch_tanh": "gelu_tanh",
        "gelu_new": "gelu_tanh",
        "silu": "silu",
        "relu": None,
    }
    assert fusion._name_of(None) is None
