"""Few threads and a fixed seed for every kernel test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.manual_seed(20240601)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)
