"""A whole forward on tensors without values, which stand for a device's where there is none: it must call only what is
there for CUDA, mix no devices, and read nothing back."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pyruntime.model.fused_layers import fuse_layers
from pyruntime.model.fusion import fuse
from pyruntime.model.graphs import OnDeviceAlone
from pyruntime.model.kv_cache import KVCache
from pyruntime.model.linear import use_own_linears
from pyruntime.model.loader import LoadedModel, load_model
from pyruntime.model.output_head import output_head_of
from pyruntime.model.runner import ModelRunner
from pyruntime.model.weights import load_weights
from pyruntime.scheduler.batch_builder import BatchBuilder
from pyruntime.scheduler.blocks import BlockPool
from pyruntime.scheduler.scheduler import Scheduler
from pyruntime.scheduler.sequence import Sequence
from pyruntime.scheduler.step_shapes import StepShapes
from pyruntime.types import Task
from tests.models.architectures import BLOCK, DECODERS, ENCODERS, factory_of, save

DEVICE = "meta"
SOURCES = Path(__file__).resolve().parents[2] / "csrc" / "cuda"
WITH_CUDA = {name for path in SOURCES.glob("*.cu") for name in re.findall(r'm\.impl\("(\w+)"', path.read_text())}
# These move tensors between devices.
MOVES = {"aten::_to_copy", "aten::copy_"}


class OnDevice(TorchDispatchMode):
    """Raises where one op takes tensors of both devices (but for single numbers, which torch hands over itself), and
    notes which of this project's ops are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        devices = {each.device.type for each in tensors if each.dim() > 0}
        if len(devices) > 1 and func._schema.name not in MOVES:
            raise RuntimeError(f"{func} takes tensors of {sorted(devices)}")
        if func.namespace == "pyruntime":
            self.names.add(func._schema.name.removeprefix("pyruntime::"))
        return func(*args, **(kwargs or {}))


def placed_model(folder: Path) -> LoadedModel:
    """What ``load_model`` gives on a GPU, its probe run on the CPU."""
    loaded = load_model(folder, "bfloat16", "cpu")
    model = load_weights(folder, loaded.architecture, loaded.dtype).to(DEVICE).eval().requires_grad_(False)
    use_own_linears(model, row_invariant=False)
    shapes = {index: layer.shape for index, layer in loaded.layers.items()}
    assert fuse(model) == 0 and fuse_layers(model, shapes, loaded.position_offset) == 0
    head = output_head_of(model, model.config, row_invariant=False) if loaded.output_head is not None else None
    return dataclasses.replace(loaded, model=model, body=model.base_model, device=DEVICE, output_head=head)


def forwards(loaded: LoadedModel) -> Iterator[tuple[torch.Tensor, Any]]:
    """(hidden rows, batch) of prompts in chunks and of what follows them."""
    cache = pool = None
    if loaded.is_causal:
        cache, pool = KVCache(loaded.cache_shapes, 32, BLOCK, loaded.dtype, DEVICE), BlockPool(32, BLOCK)
    scheduler, runner = Scheduler(pool, 24, 8), ModelRunner(loaded, cache)
    builder = BatchBuilder(BLOCK if loaded.is_causal else 0, DEVICE, loaded.takes_token_types)
    for length in (5, 20):
        scheduler.add([Sequence(Task.EMBED, list(range(3, 3 + length)))])
    while scheduler.has_work:
        plan = scheduler.schedule()
        batch = builder.build(plan)
        yield runner.forward(batch), batch
        scheduler.advance(plan)
        for span in batch.rows:
            if span.reads:
                scheduler.finish(span.sequence)


def decode_step(loaded: LoadedModel) -> torch.Tensor:
    """Rows of a step as it is captured: what it needs of the host would be there at the capture alone."""
    cache = KVCache(loaded.cache_shapes, 8, BLOCK, loaded.dtype, DEVICE, has_spare=True)
    shapes = StepShapes(4, 64, 8, BLOCK)
    batch = BatchBuilder(BLOCK, DEVICE, loaded.takes_token_types, shapes).padding(shapes.all()[0])
    with OnDeviceAlone(batch.input_ids.device):
        return ModelRunner(loaded, cache).compute(batch)


@pytest.mark.parametrize(
    ("model_type", "fields", "is_decoder"),
    [(name, DECODERS[name], True) for name in ("gemma3_text", "llama", "qwen3_moe", "gpt2", "deepseek_v3")]
    + [(name, ENCODERS[name], False) for name in ("bert", "xlm-roberta", "modernbert")],
)
def test_a_forward_stays_on_the_device(
    tmp_path: Path, model_type: str, fields: dict[str, Any], is_decoder: bool
) -> None:
    save(tmp_path, model_type, fields, factory_of(model_type, is_decoder))
    loaded = placed_model(tmp_path)
    with OnDevice() as calls:
        for hidden, batch in forwards(loaded):
            assert hidden.device.type == DEVICE and hidden.shape == (batch.num_tokens, loaded.hidden_size)
            if loaded.output_head is not None:
                assert loaded.output_head.logits(hidden).device.type == DEVICE
    if loaded.is_causal:
        assert decode_step(loaded).shape == (4, loaded.hidden_size)
    assert calls.names == ({"store_kv", "paged_attention"} if loaded.is_causal else {"packed_attention"})
    assert calls.names <= WITH_CUDA


def test_reading_back_and_mixing_devices_would_show() -> None:
    x = torch.ones(3, device=DEVICE)
    with OnDevice():
        with pytest.raises((RuntimeError, NotImplementedError)):
            bool(x.sum() > 0)
        with pytest.raises(RuntimeError, match=r"add.* takes tensors of \['cpu', 'meta'\]"):
            x + torch.ones(3)


def test_ops_without_a_cuda_kernel_would_show() -> None:
    assert {"store_kv", "copy_blocks", "packed_attention", "paged_attention", "sample"} <= WITH_CUDA
    assert not {"linear_rows", "decoder_layer", "rms_norm"} & WITH_CUDA
