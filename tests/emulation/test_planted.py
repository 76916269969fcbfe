"""The emulation and its sanitizers find faults planted on purpose, and are silent without them."""

from __future__ import annotations

import pytest
import torch

from tests.emulation.harness import FORWARD, RANDOM, REVERSE, Emulation, Replay


def rotate(emulation: Emulation, name: str) -> bool:
    given, out = torch.randn(128), torch.zeros(128)
    emulation(name, given, out)
    return torch.equal(out, given.roll(-1))


def test_missing_barrier_shows_in_another_order(emulation: Emulation) -> None:
    right = {}
    for order in (FORWARD, REVERSE, RANDOM):
        emulation.order = order
        assert rotate(emulation, "rotate")
        right[order] = rotate(emulation, "rotate_without_barrier")
    assert not all(right.values())


def test_missing_barrier_is_a_race(thread: Replay) -> None:
    given, out = torch.randn(128), torch.zeros(128)
    for order in (FORWARD, REVERSE):
        thread.order = order
        assert thread.run("rotate", given, out).returncode == 0
        assert torch.equal(out, given.roll(-1))
        assert "data race" in thread.run("rotate_without_barrier", given, out).stderr


def test_barrier_that_some_threads_miss_is_reported(emulation: Emulation) -> None:
    with pytest.raises(RuntimeError, match="64 threads wait at a barrier, 0 in a warp operation, 64 have left"):
        emulation("divergent", torch.zeros(128))
    assert rotate(emulation, "rotate"), "the emulation goes on after a failure"


def test_warp_operation_that_some_lanes_miss_is_reported(emulation: Emulation) -> None:
    with pytest.raises(RuntimeError, match="64 in a warp operation, 64 have left"):
        emulation("partial_warp", torch.zeros(128))


def test_unknown_kernel_is_refused(emulation: Emulation) -> None:
    with pytest.raises(RuntimeError, match="no kernel is called nothing"):
        emulation("nothing")


def test_write_past_a_buffer_is_found(address: Replay) -> None:
    out = torch.zeros(128)
    assert address.run("overrun", out, 128, 0).returncode == 0
    assert "heap-buffer-overflow" in address.run("overrun", out, 128, 1).stderr


def test_write_past_shared_memory_is_found(address: Replay) -> None:
    out = torch.zeros(128)
    assert address.run("shared_overrun", out, 0).returncode == 0
    done = address.run("shared_overrun", out, 1)
    assert done.returncode != 0
    assert "out of bounds" in done.stderr or "global-buffer-overflow" in done.stderr


def test_wrong_reduction_shows(emulation: Emulation) -> None:
    given, out = torch.randn(128), torch.zeros(4)
    want = given.double().view(4, 32).sum(1)
    emulation("warp_sums", given, out)
    assert (out - want).abs().max() < 1e-5
    emulation("short_warp_sums", given, out)
    assert (out - want).abs().max() > 1e-2
