"""The masked-language-model head of an encoder, taken apart for SPLADE: hidden rows → what its decoder multiplies.

logits = W · transform(h) + b. SPLADE needs the largest logit of each vocabulary entry over a text's tokens alone, so
W and b go to a kernel that never makes the [T, V] logits, and only ``transform`` (dense, activation, LayerNorm) runs
here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch.nn import functional
from transformers.modeling_outputs import BaseModelOutput

from pyruntime.errors import ModelLoadError

Transform = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class MaskedLMHead:
    """``transform`` [T, H] → [T, E] in the model's dtype; ``weight`` [V, E] and ``bias`` [V] or None of its decoder."""

    transform: Transform
    weight: torch.Tensor
    bias: torch.Tensor | None


# transformers gives the same head many homes: (where the parts are, how they are put together), the first found counts.
_HOMES: list[tuple[tuple[str, ...], Callable[..., Transform]]] = [
    (("cls.predictions.transform",), lambda transform: transform),
    (("lm_head.dense", "lm_head.layer_norm"), lambda dense, norm: lambda h: norm(functional.gelu(dense(h)))),
    (
        ("vocab_transform", "activation", "vocab_layer_norm"),
        lambda dense, activation, norm: lambda h: norm(activation(dense(h))),
    ),
    (("generator_predictions", "generator_lm_head"), lambda transform, _: transform),
    (
        ("predictions.dense", "predictions.activation", "predictions.LayerNorm"),
        lambda dense, activation, norm: lambda h: norm(activation(dense(h))),
    ),
    (("head.norm", "head", "decoder"), lambda _norm, head, _decoder: head),
    (("lm_head.weight",), lambda _: lambda h: h),
]


def masked_lm_head(model: Any) -> MaskedLMHead:
    """The head of a ``…ForMaskedLM``, compared with the model's own before it is trusted.

    Raises ``ModelLoadError`` for one that is not known or does not agree, by the class's name.
    """
    name = type(model).__name__
    decoder = model.get_output_embeddings()
    if not name.endswith("ForMaskedLM") or decoder is None:
        raise ModelLoadError(f"{name} has no masked-language-model head, which SPLADE reads")
    for paths, build in _HOMES:
        try:
            parts = [attrgetter(path)(model) for path in paths]
        except AttributeError:
            continue
        head = MaskedLMHead(build(*parts), decoder.weight, getattr(decoder, "bias", None))
        _check(model, head)
        return head
    raise ModelLoadError(f"{name}: its masked-language-model head is of a kind that SPLADE is not served with")


@torch.inference_mode()
def _check(model: Any, head: MaskedLMHead) -> None:
    """The parts against the whole on a few random rows, so that a variant of a known head is not taken for it."""
    name, generator = type(model).__name__, torch.Generator().manual_seed(0)
    rows = torch.randn(5, model.config.hidden_size, generator=generator).to(head.weight)
    body = model.base_model
    # transformers has no call for the head alone: the model runs with a body that answers with these rows.
    body.forward = lambda *_, **__: BaseModelOutput(last_hidden_state=rows.unsqueeze(0))
    try:
        own = model(input_ids=torch.ones(1, 5, dtype=torch.int64, device=rows.device)).logits[0].float()
    finally:
        del body.forward
    try:
        parts = functional.linear(head.transform(rows), head.weight, head.bias).float()
    except RuntimeError as error:  # a decoder of another shape, as MobileBERT's
        raise ModelLoadError(f"{name}: its masked-language-model head cannot be taken apart: {error}") from error
    difference = ((parts - own).norm() / own.norm()).item()
    if not difference <= (1e-4 if rows.dtype is torch.float32 else 0.02):
        problem = f"differs from the model's own logits by {difference:.3g}"
        raise ModelLoadError(f"{name}: the masked-language-model head as taken apart {problem}")
