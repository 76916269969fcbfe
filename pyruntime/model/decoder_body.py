"""The body of a decoder whose layers are fused: embeddings, all layers as one op, and the last norm.

Rotation angles are looked up: torch computes cosines and sines of the few rows of a step on all threads, and waits for
each of them, which costs more than a layer whenever one of the processors has something else to do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pyruntime.model.attention import AttentionContext, attending, current_context
from pyruntime.model.fusion import noting_calls, put_forward
from pyruntime.ops.decoder import DecoderStack

# Positions whose angles are kept, unless the model has fewer; those behind are computed when they come.
MOST_KEPT = 4096

Angles = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Rotation:
    """A call of a body's module that makes angles, without its positions."""

    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def angles(self, positions: torch.Tensor) -> Angles:
        """Cosines and sines [T, W] of positions int64 [T]."""
        args = tuple(positions.unsqueeze(0) if _are_positions(each) else each for each in self.args)
        kwargs = {name: positions.unsqueeze(0) if _are_positions(each) else each for name, each in self.kwargs.items()}
        cos, sin = self.module(*args, **kwargs)
        return cos[0], sin[0]


class _Kept:
    """A rotation's angles, those of the first positions from memory."""

    def __init__(self, rotation: Rotation, size: int) -> None:
        self._rotation = rotation
        self._size = size
        self._cos, self._sin = (each.clone() for each in rotation.angles(torch.arange(size)))

    def angles(self, positions: torch.Tensor, last: int) -> Angles:
        """``last``: the largest of ``positions``."""
        if last >= self._size:
            return self._rotation.angles(positions)
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)


class _Body:
    def __init__(self, body: Any, stack: DecoderStack, layers: Sequence[int], rotations: list[Rotation]) -> None:
        furthest = getattr(body.config, "max_position_embeddings", None) or MOST_KEPT
        self._stack = stack
        self._layers = layers
        self._rotations = [_Kept(each, min(MOST_KEPT, furthest)) for each in rotations]
        self._embed, self._norm = body.get_input_embeddings(), body.norm

    def __call__(
        self, input_ids: torch.Tensor, positions: torch.Tensor, context: AttentionContext, by_panels: bool
    ) -> torch.Tensor:
        """ids [1, T] at positions [1, T] → last hidden rows [1, T, H]."""
        batch, cache = context.batch, context.cache
        assert cache is not None and batch.slot_mapping is not None
        assert batch.kv_lengths is not None and batch.block_tables is not None
        last = int(positions.max()) if positions.numel() else 0
        angles = [each.angles(positions[0], last) for each in self._rotations]
        rows = self._stack(
            self._embed(input_ids)[0],
            [cos for cos, _ in angles],
            [sin for _, sin in angles],
            [cache.keys[layer] for layer in self._layers],
            [cache.values[layer] for layer in self._layers],
            batch.slot_mapping,
            batch.query_starts,
            batch.kv_lengths,
            batch.block_tables,
            by_panels,
        )
        hidden: torch.Tensor = self._norm(rows.unsqueeze(0))
        return hidden


@dataclass(slots=True)
class _Output:
    """What a packed forward reads of a body's answer."""

    last_hidden_state: torch.Tensor


def rotations_of(body: Any, run: Callable[[], Any]) -> list[tuple[Rotation, Angles]]:
    """What makes angles in a forward of ``body``, each with what it made."""
    found: list[tuple[Rotation, Angles]] = []

    def note(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        takes_positions = sum(map(_are_positions, (*args, *kwargs.values()))) == 1
        if takes_positions and isinstance(output, tuple) and len(output) == 2:
            found.append((Rotation(module, args, kwargs), output))

    with noting_calls(body.children(), note):
        run()
    return found


def put_stack(
    body: Any,
    stack: DecoderStack,
    layers: Sequence[int],
    rotations: list[Rotation],
    context: AttentionContext,
    takes: Callable[[int], bool],
    by_panels: Callable[[int], bool],
) -> bool:
    """``body`` runs through ``stack`` from now on, if that gives the bits of its own forward of ``context``'s batch.

    ``layers``: the index of each of the stack's in the cache. ``takes``: whether layers are fused for so many rows;
    ``by_panels``: how many rows are multiplied.
    """
    ids, positions = context.batch.input_ids.unsqueeze(0), context.batch.positions.unsqueeze(0)
    try:
        own = _Body(body, stack, layers, rotations)
        with attending(context):
            expected = body(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
            found = own(ids, positions, context, by_panels(ids.shape[1]))
    except Exception:  # a body of another kind, without this norm or with rotations that take more than positions
        return False
    if not (all(map(_is_by_position, rotations)) and torch.equal(found, expected)):
        return False
    plain = type(body).forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        context = current_context()
        is_as_tried = not args and kwargs.keys() == {"input_ids", "position_ids", "use_cache"}
        if context is None or context.cache is None or not is_as_tried or not takes(kwargs["input_ids"].shape[1]):
            return plain(self, *args, **kwargs)
        ids = kwargs["input_ids"]
        return _Output(own(ids, kwargs["position_ids"], context, by_panels(ids.shape[1])))

    put_forward(body, forward)
    return True


def _are_positions(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype is torch.int64


def _is_by_position(rotation: Rotation) -> bool:
    """Whether a position's angles depend on nothing else; those of some models change when texts are long."""
    furthest = getattr(getattr(rotation.module, "config", None), "max_position_embeddings", None) or MOST_KEPT
    near = torch.arange(8)
    alone, beside = rotation.angles(near), rotation.angles(torch.cat([near, torch.tensor([furthest - 1])]))
    return all(torch.equal(a, b[: len(near)]) for a, b in zip(alone, beside, strict=True))
