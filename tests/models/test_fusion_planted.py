"""Layers that are nearly what an op computes keep their path, in bfloat16 and int8 too, whose roundings hide more."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pyruntime.model import fused_layers
from tests.models.test_fusion import decoder, fused_layers_of


def nearly_alike(model: Any) -> Any:
    """Its norms differ by less than what a layer in bfloat16 may be off."""
    for place, (name, weight) in enumerate(model.named_parameters()):
        if name.endswith("norm.weight"):
            weight.copy_(weight[0] + torch.linspace(-0.01, 0.01, len(weight)).roll(place))
    return model


def swapped(kind: Any, first: str, second: str) -> Any:
    """A class of layers that take two of their norms for each other."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        one, other = getattr(self, first), getattr(self, second)
        setattr(self, first, other), setattr(self, second, one)
        try:
            return kind.forward(self, *args, **kwargs)
        finally:
            setattr(self, first, one), setattr(self, second, other)

    return type(kind.__name__, (kind,), {"forward": forward})


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("model_type", "norms"),
    [
        ("llama", ("input_layernorm", "post_attention_layernorm")),
        ("gemma3_text", ("post_attention_layernorm", "post_feedforward_layernorm")),
    ],
)
def test_norms_that_are_nearly_alike_are_told_apart(
    model_type: str, norms: tuple[str, str], dtype: torch.dtype, int8: bool
) -> None:
    model = nearly_alike(decoder(model_type, dtype, intermediate_size=96))
    assert fused_layers_of(model, int8) == 2
    model = nearly_alike(decoder(model_type, dtype, intermediate_size=96))
    for layer in model.base_model.layers:
        layer.__class__ = swapped(type(layer), *norms)
    assert fused_layers_of(model, int8) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_window_that_is_not_the_layers_is_seen_in_int8_too(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = fused_layers._Fused.__call__
    for wrong in (-1, 2, 5):  # the windows have 5 keys: 4 to the left

        def other(self: Any, *args: Any, wrong: int = wrong) -> torch.Tensor:
            right, self._numbers = self._numbers, (*self._numbers[:4], wrong, *self._numbers[5:])
            try:
                return plain(self, *args)
            finally:
                self._numbers = right

        monkeypatch.setattr(fused_layers._Fused, "__call__", other)
        assert fused_layers_of(decoder("mistral", dtype, intermediate_size=96), int8=True) == 0
    monkeypatch.undo()
    assert fused_layers_of(decoder("mistral", dtype, intermediate_size=96), int8=True) == 2
