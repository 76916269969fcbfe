"""Arrays of the host on a device: the same values, dtypes and shapes, dense and aligned."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pyruntime import placing

ARRAYS: dict[str, np.ndarray] = {
    "ids": np.array([3, -1, 2**40], np.int64),
    "none": np.array([], np.int32),
    "flag": np.array([True]),
    "table": np.arange(15, dtype=np.int32).reshape(5, 3),
    "turned": np.arange(6, dtype=np.float32).reshape(2, 3).T,
    "last": np.array([0.1, np.inf, np.nan], np.float32),
}


def assert_as_given(placed: dict[str, torch.Tensor]) -> None:
    assert list(placed) == list(ARRAYS)
    for name, array in ARRAYS.items():
        want = torch.from_numpy(array)
        assert placed[name].dtype is want.dtype
        assert torch.equal(placed[name].nan_to_num(7.0), want.nan_to_num(7.0)), name


def test_on_the_cpu_nothing_is_copied() -> None:
    placed = placing.place(ARRAYS, "cpu")
    assert_as_given(placed)
    assert all(placed[name].data_ptr() == array.ctypes.data for name, array in ARRAYS.items() if array.size)


def test_one_copy_holds_them_all() -> None:
    placed = placing.placed_together(ARRAYS, "cpu", is_pinned=False)
    assert_as_given(placed)
    assert len({tensor.untyped_storage().data_ptr() for tensor in placed.values()}) == 1
    for tensor in placed.values():
        assert tensor.is_contiguous() and tensor.storage_offset() * tensor.element_size() % placing.ALIGNMENT == 0


def test_on_another_device_they_have_their_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = []
    to = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda *args, **options: copies.append(1) or to(*args, **options))
    placed = placing.place(ARRAYS, "meta")
    assert len(copies) == 1
    for name, array in ARRAYS.items():
        assert placed[name].device.type == "meta" and placed[name].shape == array.shape
        assert placed[name].dtype is torch.from_numpy(array).dtype and placed[name].is_contiguous()


def test_nothing_is_nothing() -> None:
    assert placing.place({}, "meta") == {} == placing.place({}, "cpu")
