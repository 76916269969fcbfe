"""Bodies that run through all their layers at once: to the same bits, and only where nothing else happens in them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pyruntime.model import decoder_body, fused_layers
from pyruntime.model.decoder_body import Rotation
from pyruntime.model.probe import probe_body
from tests.models.test_fusion import WHOLE, decoder, fused_layers_of, rows_and_cache


def answers(model: Any) -> list[torch.Tensor]:
    """Rows, keys and values of a small batch."""
    layers = probe_body(model, "cpu", 0, is_lm=True).layers
    rows, cache = rows_and_cache(model, layers)
    return [rows, *cache.keys.values(), *cache.values.values()]


@pytest.mark.parametrize("kept", [4096, 6])  # the second: some angles are computed when they come
@pytest.mark.parametrize("model_type", [*WHOLE, "two rotations"])
def test_all_layers_at_once_give_the_bits_of_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch, model_type: str, kept: int
) -> None:
    monkeypatch.setattr(decoder_body, "MOST_KEPT", kept)
    fields: dict[str, Any] = {}
    if model_type == "two rotations":
        model_type, fields = "gemma3_text", {"layer_types": ["sliding_attention", "full_attention"]}
    put = []
    real = fused_layers.put_stack
    monkeypatch.setattr(fused_layers, "put_stack", lambda *args: put.append(real(*args)))
    whole = decoder(model_type, torch.bfloat16, **fields)
    assert fused_layers_of(whole) == 2 and put == [True]
    monkeypatch.setattr(fused_layers, "put_stack", lambda *_: False)
    plain = decoder(model_type, torch.bfloat16, **fields)
    assert fused_layers_of(plain) == 2
    for own, wanted in zip(answers(whole), answers(plain), strict=True):
        assert torch.equal(own, wanted)


def test_a_body_that_does_more_runs_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    put = []
    real = fused_layers.put_stack
    monkeypatch.setattr(fused_layers, "put_stack", lambda *args: put.append(real(*args)))
    model = decoder("llama")
    body = model.base_model
    body.layers[1].register_forward_pre_hook(lambda _, args: (2 * args[0], *args[1:]))
    assert fused_layers_of(model) == 2 and put == [False]


def test_angles_that_depend_on_the_other_positions_are_not_kept() -> None:
    class Stretched(torch.nn.Module):
        """Longer texts turn more slowly."""

        config = type("Config", (), {"max_position_embeddings": 64})

        def forward(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            angles = positions[..., None] / (1.0 if positions.max() < 32 else 2.0) * torch.ones(8)
            return angles.cos().to(x.dtype), angles.sin().to(x.dtype)

    x = torch.zeros(1)
    assert not decoder_body._is_by_position(Rotation(Stretched(), (x, torch.zeros(1, 1).long()), {}))


def test_the_op_refuses_what_does_not_fit() -> None:
    names, x = torch.ops.pyruntime, torch.zeros(1, 8)
    batch = (torch.zeros(1).long(), *[torch.zeros(1).int()] * 2, torch.zeros(1, 1).int())
    with pytest.raises(RuntimeError, match="there is none of number -1"):
        names.decoder_stack(x, [x], [x], [x], [x], *batch, -1, False)
    with pytest.raises(RuntimeError, match="expected 18, 4 and 3 a layer"):
        names.make_decoder_stack([x], [1.0], [1])
    with pytest.raises(RuntimeError, match="layer 0 lacks its 1"):
        names.make_decoder_stack([x, *[None] * 17], [1.0] * 4, [1] * 3)
