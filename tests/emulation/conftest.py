"""The emulated kernels, built once a session, and the same under sanitizers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.emulation.harness import FORWARD, Emulation, Replay, has_sanitizer


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.manual_seed(20240601)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def _library() -> Emulation:
    return Emulation()


@pytest.fixture
def emulation(_library: Emulation) -> Emulation:
    _library.order, _library.seed = FORWARD, 0
    return _library


@pytest.fixture(scope="session")
def _sanitizers() -> dict[str, bool]:
    return {kind: has_sanitizer(kind) for kind in ("address", "thread")}


def _replay(kind: str, available: dict[str, bool], folder: Path) -> Replay:
    if not available[kind]:
        pytest.skip(f"this g++ has no {kind} sanitizer")
    return Replay(kind, folder)


@pytest.fixture
def address(_sanitizers: dict[str, bool], tmp_path: Path) -> Replay:
    """Under AddressSanitizer and UndefinedBehaviorSanitizer."""
    return _replay("address", _sanitizers, tmp_path)


@pytest.fixture
def thread(_sanitizers: dict[str, bool], tmp_path: Path) -> Replay:
    """Under ThreadSanitizer, which sees every CUDA thread as one of its own."""
    return _replay("thread", _sanitizers, tmp_path)
