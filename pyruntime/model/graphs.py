"""Steps captured as CUDA graphs: launched as a whole, where Python and launches would take longer than their kernels.

A captured step is the forward over a batch that stands still: its arrays, the cache and the weights lie where they lay
at the capture, and only what is in them changes. Each step copies its own arrays there and replays the graph. Which
steps those are says ``scheduler/step_shapes.py``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pyruntime.types import ForwardBatch, StepShape

Forward = Callable[[ForwardBatch], torch.Tensor]

# torch captures one graph at a time in a process.
_capturing = threading.Lock()
_VALUES_NEEDED = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
# Need them only where a tensor of truth values says what is meant.
_INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
# The product of experts. Elsewhere, and of other dtypes than bfloat16, torch reads its bounds on the host.
_GROUPED, _GROUPED_CAPABILITIES = "aten::_grouped_mm", (9, 10)
_GROUPED_BY_LOOP = "transformers::grouped_mm_fallback"  # reads them inside the op
# By these tensors come from another device, or from the host's own numbers.
_MOVES = {"aten::_to_copy", "aten::copy_", "aten::lift_fresh"}


class NotCapturable(Exception):
    """A forward does what a graph cannot: it waits for the device, or answers otherwise when it is replayed."""


class Recorder(Protocol):
    def record(self, call: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """(what does the same again, the tensor that the answer of each time lies in)."""
        ...


class CudaRecorder:
    """Graphs of one device that share their memory, so that no two may run at once, nor one's answer be read behind
    another's run."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._stream = torch.cuda.Stream(self._device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, call: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """As ``Recorder``. ``call`` runs once before, so that libraries load their kernels and take their memory."""
        graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device)
        # The outer block gives the caller's stream back whatever becomes of the capture.
        with _capturing, torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_stream(before)
            call()
            # What other threads do meanwhile, as for models that are being served, is no part of it and no error.
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                answer = call()
        return graph.replay, answer


@dataclass(slots=True)
class _Step:
    standing: ForwardBatch
    replay: Callable[[], None]
    hidden: torch.Tensor


class CapturedSteps:
    """The forward of padded batches by replay of what was captured of it for each of their shapes."""

    @torch.inference_mode()
    def __init__(
        self,
        forward: Forward,
        batches: Iterable[tuple[ForwardBatch, ForwardBatch]],
        recorder: Recorder,
        least_cosine: float,
    ) -> None:
        """``batches``: of each shape two. The arrays of one become the standing ones; rows of the other have to come
        out of the graph as they do without it, up to ``least_cosine``.

        Raises ``NotCapturable``, or what torch raises.
        """
        self._steps: dict[StepShape | None, _Step] = {}
        for standing, other in batches:
            with OnDeviceAlone(other.input_ids.device):
                wanted = forward(other).double()
            self._steps[standing.shape] = _Step(standing, *recorder.record(partial(forward, standing)))
            cosine = torch.nn.functional.cosine_similarity(self.forward(other).double(), wanted, dim=-1).min().item()
            if not cosine >= least_cosine:
                raise NotCapturable(f"rows of a graph of {standing.shape} have cosine {cosine:.4f} with those without")

    def __len__(self) -> int:
        return len(self._steps)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Hidden rows [T, H] of a batch of a captured shape; the next call overwrites them."""
        step = self._steps[batch.shape]
        _overwrite(step.standing, batch)
        step.replay()
        return step.hidden


class OnDeviceAlone(TorchDispatchMode):
    """Within it, ops that need a tensor's values on the host or move one between devices raise ``NotCapturable``.

    Both would wait for the device, which a capture cannot, or be done once at the capture and then never again. It is
    to be found out before: torch does not get over a capture that breaks off.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._kind = device.type

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if needs_values(func, args):
            raise NotCapturable(f"{func} needs the values of a tensor on the host")
        answer = in_parts(self, func, args, kwargs or {})
        if name in _MOVES:
            devices = {each.device.type for each in tree_leaves((args, kwargs, answer)) if torch.is_tensor(each)}
            if self._kind in devices and (len(devices) > 1 or name == "aten::lift_fresh"):
                raise NotCapturable(f"{func} brings a tensor from the host or takes it there")
        return answer


def in_parts(mode: TorchDispatchMode, func: Any, args: Any, kwargs: Any) -> Any:
    """What an op answers, ``mode`` being shown the ops that it is made of, which inference mode else leaves unseen."""
    with mode:
        answer = func.decompose(*args, **kwargs)
    return func(*args, **kwargs) if answer is NotImplemented else answer


def needs_values(func: Any, args: Any) -> bool:
    """Whether an op with these arguments looks at the values of a tensor on the host."""
    name = func._schema.name
    if name in _INDEXING:
        return any(each.dtype in (torch.bool, torch.uint8) for each in args[1] if each is not None)
    if name == _GROUPED and args[0].is_cuda:
        capability = torch.cuda.get_device_capability(args[0].device)
        return args[0].dtype is not torch.bfloat16 or capability[0] not in _GROUPED_CAPABILITIES
    return name == _GROUPED_BY_LOOP or bool(_VALUES_NEEDED.intersection(func.tags))


def _overwrite(standing: ForwardBatch, batch: ForwardBatch) -> None:
    """The arrays of ``batch`` into those of ``standing``, in one copy for each dtype."""
    pairs: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for name in _ARRAYS:
        target, source = getattr(standing, name), getattr(batch, name)
        if target is not None:
            targets, sources = pairs.setdefault(target.dtype, ([], []))
            targets.append(target)
            sources.append(source)
    for targets, sources in pairs.values():
        torch._foreach_copy_(targets, sources)


_ARRAYS = [field.name for field in fields(ForwardBatch) if field.name not in ("rows", "block_copies", "shape")]
