"""Whole layers of encoders that one op stands in for: which, that nothing but rounding changes, and that this does not
hang on how many rows there are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel

from pyruntime.model import encoder_layers, fusion
from pyruntime.model.attention import IMPLEMENTATION, AttentionContext
from pyruntime.model.linear import PackedLinear, use_own_linears
from pyruntime.model.loader import _position_offset
from pyruntime.model.packed import run_packed
from pyruntime.model.probe import eager_attention, probe_body
from pyruntime.model.quantized import QuantizedLinear, quantize
from pyruntime.model.unattended import Unattended
from pyruntime.ops.linear import has_panels
from pyruntime.types import ForwardBatch
from tests.models.architectures import ENCODERS

WHOLE = ("bert", "roberta", "distilbert", "electra", "albert", "layoutlm")
NOT_WHOLE = ("esm", "eurobert", "modernbert", "nomic_bert", "gte", "jina_embeddings_v3")
# Where there is no kernel of panels everything stays as it was.
needs_panels = pytest.mark.skipif(not has_panels(torch.float32), reason="this processor has no kernel of panels")
needs_bfloat16 = pytest.mark.skipif(not has_panels(torch.bfloat16), reason="nor has it one for bfloat16")


def encoder(model_type: str, dtype: torch.dtype = torch.float32, **fields: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **ENCODERS[model_type] | fields)
    model = AutoModel.from_config(config, attn_implementation=IMPLEMENTATION).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            random = torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(name)))
            if weight.dim() == 1:  # norms and biases begin as constants, which would hide that they are not read
                weight.add_(random / 4)
            elif "embedding" not in name:  # and weights so small that attention hardly matters
                weight.mul_(4)
    return model.to(dtype).requires_grad_(False)


def offset_of(model: Any) -> int:
    return _position_offset(model)


def batch_of(lengths: tuple[int, ...]) -> ForwardBatch:
    starts = torch.tensor([0, *lengths]).cumsum(0)
    ids = [torch.arange(n) * 7 % 90 + 5 for n in lengths]
    return ForwardBatch(
        rows=[],
        input_ids=torch.cat(ids),
        positions=torch.cat([torch.arange(n) for n in lengths]),
        query_starts=starts.int(),
    )


def rows_of(model: Any, batch: ForwardBatch, unattended: Unattended | None = None) -> torch.Tensor:
    return run_packed(
        model, batch, AttentionContext(batch, causal=False, unattended=unattended), offset_of(model), None
    )


def fused(model: Any, row_invariant: bool = False, int8: bool = False) -> int:
    use_own_linears(model, row_invariant)
    fusion.fuse(model)
    probe_body(model, "cpu", offset_of(model), is_lm=False)
    if int8:
        quantize(model, offset_of(model))
    return encoder_layers.fuse_encoder_layers(model, offset_of(model))


@needs_panels
@pytest.mark.parametrize("model_type", [*WHOLE, *NOT_WHOLE])
def test_fused_layers_answer_what_plain_ones_do(model_type: str) -> None:
    model, batch = encoder(model_type), batch_of((10, 30, 1, 77))
    want = rows_of(model, batch)
    wanted = (1 if model_type == "albert" else 2) if model_type in WHOLE else 0
    assert fused(model) == wanted
    torch.testing.assert_close(rows_of(model, batch), want, atol=5e-5, rtol=5e-5)
    packed = {module for module in model.modules() if isinstance(module, PackedLinear)}
    assert len(packed) == 6 * wanted
    ids = batch.input_ids[None, :10]
    with eager_attention(model):  # transformers' own code over the packed weights
        alone = model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
    torch.testing.assert_close(alone[0], want[:10], atol=5e-5, rtol=5e-5)


@needs_bfloat16
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_have_the_same_bits_however_many_there_are(dtype: torch.dtype, int8: bool) -> None:
    model = encoder("bert", dtype, hidden_size=144, intermediate_size=208, num_attention_heads=3)
    assert fused(model, int8=int8) == 2
    assert all(isinstance(each, QuantizedLinear if int8 else PackedLinear) for each in linears_of(model))
    lengths = (10, 30, 1, 77) * 7
    many = rows_of(model, batch_of(lengths)).split(lengths)
    for n, rows in zip(lengths[:4], many, strict=False):
        assert torch.equal(rows, rows_of(model, batch_of((n,))))


def linears_of(model: Any) -> list[torch.nn.Module]:
    return [each for layer in model.encoder.layer for each in layer.modules() if isinstance(each, torch.nn.Linear)]


@needs_bfloat16
@pytest.mark.parametrize("int8", [False, True])
def test_fused_layers_in_bfloat16_stay_near_float32(int8: bool) -> None:
    batch = batch_of((10, 30, 1, 77))
    want = rows_of(encoder("bert"), batch)
    model = encoder("bert", torch.bfloat16)
    assert fused(model, int8=int8) == 2
    cosine = torch.nn.functional.cosine_similarity(rows_of(model, batch).float(), want, dim=-1)
    assert cosine.min() > (0.99 if int8 else 0.999)


@needs_panels
def test_row_invariant_models_are_fused_to_the_bit_of_plain_panels() -> None:
    model = encoder("bert")
    assert fused(model, row_invariant=True) == 2
    batch = batch_of((10, 100))
    assert torch.equal(rows_of(model, batch)[:10], rows_of(model, batch_of((10,))))


@needs_panels
def test_texts_with_tokens_that_nobody_sees_run_as_before() -> None:
    batch = batch_of((10, 30))
    behind = Unattended([(0, 7, 10)], torch.tensor([0, 7, 10, 40], dtype=torch.int32))
    model = encoder("bert")
    want = rows_of(model, batch, behind)
    assert fused(model) == 2
    torch.testing.assert_close(rows_of(model, batch, behind), want, atol=5e-5, rtol=5e-5)
    assert not torch.allclose(rows_of(model, batch), want, atol=1e-2)


def double_attention(layer: Any) -> None:
    plain = layer.attention.self.forward
    layer.attention.self.forward = lambda *args, **kwargs: (plain(*args, **kwargs)[0] * 1.01, None)


def other_residual(layer: Any) -> None:
    plain = layer.output.forward
    layer.output.forward = lambda rows, added: plain(rows, added * 0.99)


def other_activation(layer: Any) -> None:
    layer.intermediate.intermediate_act_fn = torch.nn.ReLU()


def scaled_queries(layer: Any) -> None:
    plain = layer.attention.self.query.forward
    layer.attention.self.query.forward = lambda rows: plain(rows) * 1.01


def clipped(layer: Any) -> None:
    plain = type(layer).forward
    layer.forward = lambda *args, **kwargs: plain(layer, *args, **kwargs).clamp(max=0.5)


def answers_a_pair(layer: Any) -> None:
    plain = type(layer).forward
    layer.forward = lambda *args, **kwargs: Pair(plain(layer, *args, **kwargs))


class Pair(tuple[Any]):
    def __new__(cls, rows: torch.Tensor) -> Pair:
        return super().__new__(cls, (rows,))


def norm_without_bias(layer: Any) -> None:
    layer.output.LayerNorm.bias = None


def odd_columns(layer: Any) -> None:
    layer.intermediate.dense = torch.nn.Linear(64, 90)
    layer.output.dense = torch.nn.Linear(90, 64)


def another_parameter(layer: Any) -> None:
    layer.gain = torch.nn.Parameter(torch.ones(1))


PLANTED = (double_attention, other_residual, other_activation, scaled_queries, clipped, norm_without_bias, odd_columns)


@needs_panels
@pytest.mark.parametrize("plant", [*PLANTED, another_parameter])
def test_a_layer_that_is_not_quite_one_keeps_its_path(plant: Any) -> None:
    model, batch = encoder("bert"), batch_of((10, 30))
    plant(model.encoder.layer[1])
    want = rows_of(model, batch)
    assert fused(model) == 1
    torch.testing.assert_close(rows_of(model, batch), want, atol=5e-5, rtol=5e-5)


@needs_panels
def test_projections_are_known_by_what_they_make() -> None:
    model, batch = encoder("bert"), batch_of((10, 30))
    for layer in model.encoder.layer:
        own = layer.attention.self
        query, key, value = own.query, own.key, own.value
        del own.query, own.key, own.value
        own.value, own.query, own.key = value, query, key
        layer.attention.output.LayerNorm.eps, layer.output.LayerNorm.eps = 0.5, 1e-6
    want = rows_of(model, batch)
    assert fused(model) == 2
    torch.testing.assert_close(rows_of(model, batch), want, atol=5e-5, rtol=5e-5)


@needs_bfloat16
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("is_swapped", [False, True])
def test_norms_that_are_nearly_alike_are_told_apart(
    is_swapped: bool, int8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders, find = [], encoder_layers._order
    monkeypatch.setattr(encoder_layers, "_order", lambda *call: orders.append(find(*call)) or orders[-1])
    model = encoder("bert", torch.bfloat16)
    for layer in model.encoder.layer:
        for norm, sign in ((layer.attention.output.LayerNorm, 1), (layer.output.LayerNorm, -1)):
            norm.weight.copy_(1 + sign * torch.linspace(-0.01, 0.01, 64)), norm.bias.zero_()
        if is_swapped:  # the layer names the second one first
            layer.attention.self.named_before = layer.output.LayerNorm
    assert fused(model, int8=int8) == 2
    assert [norms for _, norms in orders] == [(1, 0) if is_swapped else (0, 1)]  # found once for both layers


def arguments(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    square, row = torch.zeros(1, 16, 16, 1, dtype=dtype), torch.ones(16, dtype=dtype)
    heads: dict[str, Any] = {}
    for name in ("q", "k", "v", "o"):
        heads |= {f"{name}_weight": square, f"{name}_bias": None}
    mlp = {"up": square, "up_bias": None, "down": square, "down_bias": None}
    norms = {"attention_norm": row, "attention_norm_bias": row, "mlp_norm": row, "mlp_norm_bias": row}
    numbers = {"attention_epsilon": 1e-6, "mlp_epsilon": 1e-6, "activation": 1, "heads": 2, "kv_heads": 2}
    windows = {"scale": 1.0, "window_left": -1, "window_right": -1}
    x, starts = torch.ones(3, 16, dtype=dtype), torch.tensor([0, 3], dtype=torch.int32)
    return {"x": x, "starts": starts} | heads | mlp | norms | numbers | windows


BAD = {
    "starts": torch.tensor([0, 4], dtype=torch.int32),
    "q_weight": torch.zeros(1, 15, 16, 1),
    "k_weight": torch.zeros(16, 16),
    "v_bias": torch.zeros(16, dtype=torch.bfloat16),
    "o_weight": torch.zeros(1, 64 * 5, dtype=torch.uint8),
    "down": torch.zeros(2, 16, 16, 1),
    "mlp_norm": torch.ones(15),
    "mlp_epsilon": -1.0,
    "activation": 4,
    "heads": 3,
    "kv_heads": 0,
    "window_left": -2,
}


@needs_panels
def test_arguments_that_do_not_fit_are_refused() -> None:
    layer = torch.ops.pyruntime.encoder_layer
    assert torch.equal(layer(**arguments()), torch.ones(3, 16))  # norms of rows without variance are their biases
    for name, value in BAD.items():
        with pytest.raises(RuntimeError):
            layer(**arguments() | {name: value})
    with pytest.raises(RuntimeError, match="no such kernel"):
        layer(**arguments(torch.float16) | {name: torch.zeros(1, 8, 16, 2).half() for name in MATRICES})
    none = {"x": torch.ones(0, 16), "starts": torch.zeros(2, dtype=torch.int32)}
    assert layer(**arguments() | none).shape == (0, 16)


MATRICES = ("q_weight", "k_weight", "v_weight", "o_weight", "up", "down")
