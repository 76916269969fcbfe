"""The vocabulary head of a causal model: hidden rows → logits, with the model's own scale and softcap."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from pyruntime.model.linear import Buffer, packed_in_panels
from pyruntime.model.memory import on_huge_pages
from pyruntime.ops.linear import linear_into
from pyruntime.ops.quantized import linear_int8_into, pack_int8
from pyruntime.ops.screen import Screen, has_screen, largest_columns, make_screen

# Smaller matrices stay in a processor's caches, from where nothing is gained.
LEAST_SCREENED = 2**24


@dataclass(frozen=True, slots=True)
class OutputHead:
    """logits = softcap · tanh(scale · (W h + b) / softcap); softcap 0 is off.

    weight [V, H], bias [V] or None. Gemma has a softcap, Cohere multiplies (``logit_scale``), Granite
    divides (``logits_scaling``). ``packed``: W as int8, or once more in panels, by which ``logits`` goes, whatever the
    number of rows; the scores of given tokens, and sums over the vocabulary, read W. ``screen``: by which ``largest``
    finds, where W lies in panels, has neither bias, scale nor softcap, and the processor multiplies int8.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    scale: float = 1.0
    softcap: float = 0.0
    row_invariant: bool = False
    packed: torch.Tensor | None = None
    screen: Screen | None = None

    @property
    def copies(self) -> list[torch.Tensor]:
        """What W lies in besides itself."""
        return [each for each in (self.packed, *(self.screen or ())) if each is not None]

    def logits(self, rows: torch.Tensor, buffer: Buffer | None = None) -> torch.Tensor:
        """rows [R, H] → [R, V] in the model's dtype; with a ``buffer`` they may lie there, until it is used again."""
        buffer = buffer or Buffer()
        if self.packed is None:
            return self.shape(buffer.linear(rows, self.weight, self.bias, self.row_invariant))
        out = buffer.take(rows.shape[0], self.weight.shape[0], rows.dtype)
        if self.packed.dtype is torch.uint8:
            linear_int8_into(out, rows.contiguous(), self.packed, self.bias)
        else:
            linear_into(out, rows.contiguous(), self.packed, self.bias, by_panels=True)
        return self.shape(out)

    def largest(self, rows: torch.Tensor) -> list[int]:
        """rows [R, H] → of each the token of the largest logit, the lowest of equal ones; with a ``screen`` only.

        -1 where that takes all ``logits``, rows that are not finite among them.
        """
        if self.packed is None or self.screen is None:
            raise ValueError("this head has no screen")
        ids: list[int] = largest_columns(rows.contiguous(), self.packed, self.screen)[0].tolist()
        return ids

    def shape(self, raw: torch.Tensor) -> torch.Tensor:
        """Scale and softcap of raw dot products, whatever their shape."""
        if self.scale != 1.0:
            raw = raw * self.scale
        return torch.tanh(raw / self.softcap) * self.softcap if self.softcap else raw


def output_head_of(model: Any, config: Any, row_invariant: bool, is_int8: bool = False) -> OutputHead:
    """The head of a ``…ForCausalLM`` model; the load-time self-check compares its logits with the model's own."""
    linear_module = model.get_output_embeddings()
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    softcap = float(getattr(config, "final_logit_softcapping", None) or 0.0)
    weight, bias = linear_module.weight, getattr(linear_module, "bias", None)
    packed = pack_int8(weight) if is_int8 else packed_in_panels(weight)
    if packed is not None:
        (packed,) = on_huge_pages([packed])
    head = OutputHead(weight, bias, scale, softcap, row_invariant, packed)
    return head if is_int8 else dataclasses.replace(head, screen=_screen_of(head))


def _screen_of(head: OutputHead) -> Screen | None:
    is_plain = head.bias is None and head.scale == 1.0 and not head.softcap
    is_possible = head.packed is not None and has_screen(head.weight.dtype)
    if not is_plain or not is_possible or head.weight.numel() < LEAST_SCREENED:
        return None
    screen = make_screen(head.weight)
    return screen and screen._replace(packed=on_huge_pages([screen.packed])[0])
