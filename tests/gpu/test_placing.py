"""Arrays of the host come to the device whole, and pinned memory is not written again while a copy out of it waits."""

from __future__ import annotations

import numpy as np
import torch

from pyruntime.placing import place
from tests.test_placing import ARRAYS, assert_as_given


def test_values_dtypes_and_shapes() -> None:
    placed = place(ARRAYS, "cuda")
    assert all(tensor.is_cuda and tensor.is_contiguous() for tensor in placed.values())
    assert_as_given({name: tensor.cpu() for name, tensor in placed.items()})


def test_steps_that_the_device_has_yet_to_reach() -> None:
    busy = torch.randn(4096, 4096, device="cuda")
    for _ in range(20):
        busy = torch.nn.functional.normalize(busy @ busy)
    placed = [place({"step": np.full(5000, step), "own": np.array([step], np.int32)}, "cuda") for step in range(200)]
    for step, tensors in enumerate(placed):
        assert bool((tensors["step"] == step).all()) and tensors["own"].tolist() == [step]
