"""A device that models cannot run on is refused before anything is loaded, with what is missing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pyruntime import ops
from pyruntime.config import Settings
from pyruntime.errors import ModelLoadError
from pyruntime.model.device import check_device
from pyruntime.model.loader import load_model
from pyruntime.serving import load_served_model


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were two GPUs, and kernels for them."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(ops, "build_info", lambda: {"cuda": True})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0) if index else (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Tesla T4")


@pytest.mark.usefixtures("gpu")
def test_a_device_that_is_there_passes() -> None:
    check_device("cuda:1")
    check_device("cpu")


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("device", "name", "value", "message"),
    [
        ("cuda:2", None, None, "device cuda:2: there are 2 GPUs, counted from 0"),
        ("cuda", None, None, "device cuda: Tesla T4 has compute capability 7.5; 8.0 is the least"),
        ("cuda:1", "torch.cuda.is_available", lambda: False, "device cuda:1: torch finds no GPU"),
        ("cuda:1", "pyruntime.ops.build_info", lambda: {"cuda": False}, "built without CUDA kernels"),
        ("cuda:1", "torch.version.cuda", None, "is a CPU build"),
    ],
)
def test_what_is_missing_is_named(
    device: str, name: str | None, value: object, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name is not None:
        monkeypatch.setattr(name, value)
    with pytest.raises(ModelLoadError, match=message):
        check_device(device)


def test_the_device_is_looked_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ModelLoadError, match=r"device cuda: torch .* is a CPU build"):
        load_served_model("name", "no/such/folder", Settings(device="cuda"), print)


def test_what_only_a_cpu_does_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="deterministic is for device cpu, not cuda"):
        load_model(tmp_path, "auto", "cuda", deterministic=True)
    with pytest.raises(ModelLoadError, match="quantization int8 is for device cpu, not cuda"):
        load_model(tmp_path, "auto", "cuda", quantization="int8")
