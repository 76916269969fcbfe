"""All layers of a decoder in one call."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pyruntime import _C
from pyruntime.ops import _library


@dataclass(frozen=True, slots=True)
class LayerArguments:
    """What ``torch.ops.pyruntime.decoder_layer`` takes of one layer: its tensors from attention_norm to sinks, and its
    numbers. ``angles``: which of those at hand it rotates by."""

    tensors: Sequence[torch.Tensor | None]
    epsilon: float
    weight_offset: float
    activation: int
    scale: float
    window_left: int
    softcap: float
    angles: int


class DecoderStack:
    """Layers one after the other as ``decoder_layer`` computes each, to the same bits.

    The interpreter is free for other threads from the first layer to the last. Weights are handed over once; they live
    as long as this.
    """

    def __init__(self, layers: Sequence[LayerArguments]) -> None:
        tensors = [tensor for layer in layers for tensor in layer.tensors]
        numbers = [
            each for layer in layers for each in (layer.epsilon, layer.weight_offset, layer.scale, layer.softcap)
        ]
        settings = [each for layer in layers for each in (layer.activation, layer.window_left, layer.angles)]
        self._number: int = torch.ops.pyruntime.make_decoder_stack(tensors, numbers, settings)
        weakref.finalize(self, _C.drop_decoder_stack, self._number)

    def __call__(
        self,
        x: torch.Tensor,
        cos: Sequence[torch.Tensor],
        sin: Sequence[torch.Tensor],
        k_caches: Sequence[torch.Tensor],
        v_caches: Sequence[torch.Tensor],
        slot_mapping: torch.Tensor,
        query_starts: torch.Tensor,
        kv_lengths: torch.Tensor,
        block_tables: torch.Tensor,
        by_panels: bool,
    ) -> torch.Tensor:
        """x [T, H] → [T, H]; keys and values of its rows are in the caches, one for each layer, afterwards.

        cos, sin: [T, W] for each kind of angles. slot_mapping int64 [T], query_starts int32 [S + 1], kv_lengths int32
        [S], block_tables int32 [S, blocks]. ``by_panels``: how plain matrices are multiplied. Bad arguments raise
        ``RuntimeError``.
        """
        steps = (slot_mapping, query_starts, kv_lengths, block_tables)
        out: torch.Tensor = torch.ops.pyruntime.decoder_stack(
            x, cos, sin, k_caches, v_caches, *steps, self._number, by_panels
        )
        return out


@_library._fake("decoder_stack")
def _(x, cos, sin, *_):  # type: ignore[no-untyped-def]
    torch._check(len(cos) == len(sin), lambda: "sin: expected as many as cos")
    return x.new_empty(x.shape)
