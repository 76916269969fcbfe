"""Whether models can run on the device that the operator asks for."""

from __future__ import annotations

import torch

from pyruntime import ops
from pyruntime.errors import ModelLoadError

# What the kernels are compiled for.
LEAST_CAPABILITY = (8, 0)


def check_device(device: str) -> None:
    """``device``: cpu, cuda or cuda:INDEX. Raises ``ModelLoadError`` with what is missing."""
    if device == "cpu":
        return
    problem = _problem_of_build() or _problem_of_machine(device)
    if problem is not None:
        raise ModelLoadError(f"device {device}: {problem}")


def _problem_of_build() -> str | None:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a CPU build; it takes one for CUDA"
    if not ops.build_info()["cuda"]:
        return "pyruntime was built without CUDA kernels; PYRUNTIME_CUDA=1 builds with them"
    return None


def _problem_of_machine(device: str) -> str | None:
    if not torch.cuda.is_available():
        return "torch finds no GPU, or no driver that is new enough"
    count, index = torch.cuda.device_count(), torch.device(device).index or 0
    if index >= count:
        return f"there are {count} GPUs, counted from 0"
    capability = torch.cuda.get_device_capability(index)
    if capability < LEAST_CAPABILITY:
        least, have = (".".join(map(str, each)) for each in (LEAST_CAPABILITY, capability))
        return f"{torch.cuda.get_device_name(index)} has compute capability {have}; {least} is the least"
    return None
