"""Bodies of encoders whose packed forward is their embeddings and then their fused layers, and nothing else.

What transformers does around them (masks that nobody reads, outputs collected, a pooler whose vector nobody asks for)
takes as long as a layer of a short text. A body is known by trial: the short forward has to give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutput

from pyruntime.model.attention import AttentionContext, attending, current_context
from pyruntime.model.fusion import noting_calls, put_forward
from pyruntime.model.trial import whole_texts
from pyruntime.types import ForwardBatch

# hidden [1, T, H], starts of the texts int32 [S+1] -> [1, T, H]
Layer = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

LENGTHS = (7, 1, 5)
# What a packed forward is given.
GIVEN = frozenset({"input_ids", "position_ids", "token_type_ids", "use_cache"})


def shorten(body: Any, layers: Mapping[torch.nn.Module, Layer], offset: int) -> bool:
    """Replaces the packed forward of ``body``, in which ``layers`` stand for some modules, where that changes nothing.

    ``offset``: as ``run_packed`` takes it.
    """
    batch = whole_texts(LENGTHS, torch.arange(sum(LENGTHS)) % 5 + 3)
    given = _given(batch, offset)
    context = AttentionContext(batch, causal=False)
    with attending(context):
        short = _short(body, layers, given[0])
        if short is None or not all(short.agrees(body, each, batch) for each in given):
            return False
    _put(body, short)
    return True


def _given(batch: ForwardBatch, offset: int) -> list[dict[str, torch.Tensor]]:
    """Arguments of the batch's forward, without and with token types."""
    own = {"input_ids": batch.input_ids[None], "position_ids": (batch.positions + offset)[None]}
    types = torch.zeros_like(own["input_ids"])
    return [own, own | {"token_type_ids": types}]


@dataclass(frozen=True, slots=True)
class _Short:
    embeddings: torch.nn.Module
    layers: tuple[Layer, ...]

    def __call__(self, starts: torch.Tensor, given: dict[str, torch.Tensor]) -> torch.Tensor:
        hidden: torch.Tensor = self.embeddings(**given)
        for layer in self.layers:
            hidden = layer(hidden, starts)
        return hidden

    def agrees(self, body: Any, given: dict[str, torch.Tensor], batch: ForwardBatch) -> bool:
        """Also where both raise: what the body does not take is not asked of it later."""
        try:
            wanted = body(**given, use_cache=False).last_hidden_state
        except TypeError:
            return True
        try:
            return torch.equal(self(batch.query_starts, given), wanted)
        except TypeError:  # the embeddings take other arguments
            return False


def _short(body: Any, layers: Mapping[torch.nn.Module, Layer], given: dict[str, torch.Tensor]) -> _Short | None:
    """Of the modules in the order in which a forward has called them; None where others stand in between."""
    calls: list[tuple[torch.nn.Module, Any, Any]] = []

    def note(module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        calls.append((module, args[0] if args else kwargs.get("hidden_states"), output))

    with noting_calls(body.modules(), note):
        output = body(**given, use_cache=False).last_hidden_state
    chain = [call for call in calls if call[0] in layers]
    wanted = [*(hidden for _, hidden, _ in chain), output]
    makers = [module for module, _, made in calls if made is wanted[0] and module not in layers]
    follows = all(made is hidden for (_, _, made), hidden in zip(chain, wanted[1:], strict=True))
    # The last of them to end contains the others.
    return _Short(makers[-1], tuple(layers[module] for module, _, _ in chain)) if chain and makers and follows else None


def _put(body: Any, short: _Short) -> None:
    plain = type(body).forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        context = current_context()
        is_packed = context is not None and context.cache is None and context.unattended is None
        if context is None or not is_packed or args or not kwargs.keys() <= GIVEN or context.options is not None:
            return plain(self, *args, **kwargs)
        kwargs.pop("use_cache", None)
        return BaseModelOutput(last_hidden_state=short(context.batch.query_starts, kwargs))

    put_forward(body, forward)
