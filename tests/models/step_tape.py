"""What a graph would hold of a forward, on a CPU: every op in order, with all that a capture keeps of its arguments.

A replay runs Python again where a graph would not, and compares: an op that is there only this time, a number that is
another one, or a tensor that lies elsewhere is what a graph would have got wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pyruntime.model.graphs import in_parts

Place = tuple[Any, ...]


class NotTheSame(AssertionError):
    """A graph would have done something else than what the forward does now."""


def address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Tape(TorchDispatchMode):
    """``standing``: addresses of memory that outlives the forward, by what it is; ``writable``: of it what may be
    written. Memory that an op made is known by the number of the op."""

    def __init__(self, standing: Mapping[int, str], writable: frozenset[str] = frozenset({"cache"})) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []
        self._standing = standing
        self._writable = writable
        self._made: dict[int, Place] = {}
        self._kept: list[Any] = []  # while it is there, no other memory has its address

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._can_decompose():
            return in_parts(self, func, args, kwargs)
        self._check_writes(func, args, kwargs)
        self.calls.append((func._schema.name, *map(self._told, tree_leaves((args, kwargs)))))
        answer = func(*args, **kwargs)
        for number, each in enumerate(tree_leaves(answer)):
            if isinstance(each, torch.Tensor):
                if address(each) not in self._standing:
                    self._made.setdefault(address(each), (len(self.calls), number))
                self._kept.append(each)
        return answer

    def _told(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return repr(value)
        layout = (value.storage_offset(), tuple(value.shape), value.stride(), value.dtype)
        return self._place(value), *layout

    def _place(self, tensor: torch.Tensor) -> Any:
        where = address(tensor)
        if where in self._standing:
            return where
        if where not in self._made and tensor.numel():
            raise NotTheSame(
                f"{self.calls[-1:]}, then a tensor of {tuple(tensor.shape)} that nobody keeps in its place"
            )
        return self._made.get(where)

    def _check_writes(self, func: Any, args: Any, kwargs: Any) -> None:
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            for each in tree_leaves(value):
                name = self._standing.get(address(each)) if isinstance(each, torch.Tensor) else None
                if name is not None and name not in self._writable:
                    raise NotTheSame(f"{func} writes to {name}")


class Unread(TorchFunctionMode):
    """Raises where a CPU tensor's memory is read as it lies; one of a device is copied first, which ``OnDeviceAlone``
    sees."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("tolist", "numpy"):
            raise NotTheSame(f"{func} reads a tensor")
        return func(*args, **(kwargs or {}))


class TapeRecorder:
    """Records as ``CudaRecorder`` does. ``tensors``: by what they are, those of the model and its cache; those of the
    batch are named by ``stand``."""

    def __init__(self, tensors: Mapping[str, list[torch.Tensor]]) -> None:
        self._standing = {address(each): name for name, some in tensors.items() for each in some}
        self.num_replays = 0
        self.tapes: list[Tape] = []

    def stand(self, batch: Any) -> Any:
        tensors = (getattr(batch, name) for name in batch.__slots__)
        self._standing |= {address(each): "batch" for each in tensors if isinstance(each, torch.Tensor)}
        return batch

    def record(self, call: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        with Unread(), Tape(self._standing) as first:
            answer = call()
        self.tapes.append(first)

        def replay() -> None:
            self.num_replays += 1
            with Unread(), Tape(self._standing) as again:
                fresh = call()
            for before, now in zip(first.calls, again.calls, strict=False):
                if before != now:
                    raise NotTheSame(f"captured {before}, now {now}")
            if len(first.calls) != len(again.calls):
                raise NotTheSame(f"{len(first.calls)} ops captured, now {len(again.calls)}")
            answer.copy_(fresh)

        return replay, answer


def tensors_of(module: torch.nn.Module, cache: Any) -> dict[str, list[torch.Tensor]]:
    """By what they are, as ``TapeRecorder`` takes them."""
    kept = {"weights": [*module.parameters(), *module.buffers()]}
    return kept | {"cache": [*cache.keys.values(), *cache.values.values()]}
