"""These tests need a GPU and a build with PYRUNTIME_CUDA=1; elsewhere they are skipped."""

from __future__ import annotations

import pytest
import torch

from pyruntime import ops

HERE = str(__file__).rsplit("/", 1)[0]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = None
    if not torch.cuda.is_available():
        reason = "no GPU that torch can use"
    elif not ops.build_info()["cuda"]:
        reason = "built without CUDA (PYRUNTIME_CUDA=1 builds with it)"
    for item in items:
        if not str(item.path).startswith(HERE) or item.path.name == "test_check_script.py":
            continue
        item.add_marker(pytest.mark.gpu)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(20240601)
