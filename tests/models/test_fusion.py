"""Modules and layers that one op stands in for: which, and that nothing but rounding changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, BertConfig, BertModel

from pyruntime.model import fused_layers, fusion
from pyruntime.model.attention import IMPLEMENTATION, AttentionContext, attending
from pyruntime.model.kv_cache import KVCache
from pyruntime.model.linear import PackedLinear, use_own_linears
from pyruntime.model.output_head import output_head_of
from pyruntime.model.packed import run_packed
from pyruntime.model.probe import probe_body
from pyruntime.model.quantized import quantize
from pyruntime.ops.linear import has_panels, linear_panels

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
ACTIVATION_NAMES = ("gelu", "gelu_pytorch_tanh", "gelu_new", "silu", "relu", "gelu_10")
# Their residuals are scaled, their norms stand elsewhere, their halves run side by side, their MLP is one matrix, their
# queries grow with the distance from the start, other halves are rotated.
NOT_WHOLE = ("granite", "olmo2", "cohere", "phi3", "ministral3", "helium")


def decoder(model_type: str, dtype: torch.dtype = torch.float32, **fields: Any) -> Any:
    torch.manual_seed(0)
    if model_type == "granite":
        fields["residual_multiplier"] = 0.5
    config = AutoConfig.for_model(model_type, **SMALL | fields)
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


def fused_layers_of(model: Any, int8: bool = False) -> int:
    shapes = {i: traits.shape for i, traits in probe_body(model, "cpu", 0, is_lm=True).layers.items()}
    use_own_linears(model, row_invariant=False)
    fusion.fuse(model)
    if int8:
        quantize(model, 0)
    return fused_layers.fuse_layers(model, shapes, 0)


@pytest.mark.parametrize("model_type", ["ministral3", "helium"])
def test_attention_that_adds_little_shows_in_bfloat16_too(model_type: str) -> None:
    assert fused_layers_of(decoder(model_type, torch.bfloat16)) == 0


def test_one_layer_may_differ_from_the_others() -> None:
    model = decoder("smollm3", torch.bfloat16, no_rope_layers=[0, 1])  # its first layer does not rotate
    model.get_input_embeddings().weight.mul_(3000)  # nor does what it adds show in the rows
    assert fused_layers_of(model) == 1
    model = decoder("llama")
    model.base_model.layers[0].input_layernorm.variance_epsilon = 0.3
    assert fused_layers_of(model) == 1


@pytest.mark.parametrize("intermediate_size", [72, 80])  # the second can lie in panels
@pytest.mark.parametrize("row_invariant", [False, True])
def test_many_rows_answer_what_few_do(row_invariant: bool, intermediate_size: int) -> None:
    model = decoder("qwen3", torch.bfloat16, intermediate_size=intermediate_size)
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


def test_linears_of_fused_layers_lie_in_panels_alone() -> None:
    model = decoder("llama", torch.bfloat16, intermediate_size=80)
    plain = {name: module.weight.clone() for name, module in model.base_model.named_modules() if is_linear(module)}
    assert fused_layers_of(model) == 2
    if not has_panels(torch.bfloat16):
        return
    found = {name: module for name, module in model.base_model.named_modules() if is_linear(module)}
    assert {type(module) for module in found.values()} == {PackedLinear}
    for name, module in found.items():
        x = torch.randn(2, 3, module.in_features).bfloat16()
        assert torch.equal(module(x), linear_panels(x.flatten(0, 1), plain[name]).view(2, 3, -1))
        with pytest.raises(RuntimeError, match="meta tensors"):
            module.weight.sum().item()


def test_logits_by_panels_are_those_of_the_plain_matrix() -> None:
    model = decoder("llama", torch.bfloat16, vocab_size=64)
    head = output_head_of(model, model.config, row_invariant=False)
    rows = torch.randn(70, head.weight.shape[1]).bfloat16()
    few, many = head.logits(rows[:3]), head.logits(rows)
    if head.packed is not None:
        assert torch.equal(few, many[:3])
    torch.testing.assert_close(many.float(), rows.float() @ head.weight.float().T, atol=2e-2, rtol=2e-2)
    assert head.weight is model.get_output_embeddings().weight


def is_linear(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.Linear)


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


class Norm(torch.nn.Module):
    """As many models have it, with a gate that most calls leave out."""

    def __init__(self, width: int = 640, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.ones(width, dtype=dtype), requires_grad=False), 1e-6

    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        y = torch.nn.functional.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)
        return y if gate is None else y * gate


class Centred(Norm):
    """In bfloat16 it differs from the other kind less than by a rounding, on wide rows whose mean is 0."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x, self.weight.shape, self.weight, None, self.eps)


class Constant(Norm):
    """Another small constant than it says."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, self.weight.shape, self.weight, 9 * self.eps)


class Cut(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.clamp(-50, 50))


class Gate(Norm):
    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return x * gate


class Pair(Norm):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(x), x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_module_that_only_looks_like_a_norm_is_left_alone(dtype: torch.dtype) -> None:
    model = torch.nn.Sequential(*(kind(dtype=dtype) for kind in (Centred, Constant, Cut, Gate, Pair)))
    assert fusion.fuse(model) == 0
    assert not kinds(model)


def test_calls_of_another_kind_than_was_tried_run_as_before() -> None:
    norm, x = Norm(), torch.randn(1, 3, 640)
    assert fusion.fuse(norm) == 1
    with attending(AttentionContext(fused_layers._batch())):
        torch.testing.assert_close(norm(x), Norm.forward(norm, x))
        for args, kwargs in (((x, x), {}), ((x,), {"gate": x}), ((), {"x": x}), ((x.bfloat16(),), {})):
            assert torch.equal(norm(*args, **kwargs), Norm.forward(norm, *args, **kwargs))


def test_an_activation_is_known_by_what_it_computes() -> None:
    from transformers.activations import ACT2FN

    names = {name: fusion.name_of(ACT2FN[name]) for name in ACTIVATION_NAMES}
    assert names == {
        "gelu": "gelu",
        "gelu_pytorch_tanh": "gelu_tanh",
        "gelu_new": "gelu_tanh",
        "silu": "silu",
        "relu": None,
        "gelu_10": None,
    }
    assert fusion.name_of(None) is None


def test_a_cache_of_heads_without_width_is_refused() -> None:
    x, empty, none = torch.zeros(1, 8), torch.zeros(1, 4, 1, 0), [None]
    numbers = torch.zeros(2, dtype=torch.int32)
    batch = (torch.zeros(1, dtype=torch.int64), numbers, numbers[:1], numbers[None])
    square = torch.zeros(8, 8)
    attention = (x[0], square, None, square, None, square, *3 * none, square, None, None)
    rest = (x[0], square, square, square, None, None, 1e-6, 0.0, 3, 1.0, -1, 0.0, False)
    with pytest.raises(RuntimeError, match="k_cache: heads must be at least one wide"):
        torch.ops.pyruntime.decoder_layer(x, x, x, empty, empty, *batch, *attention, *rest)
