"""The benchmarks' meter, on a process that spends what it is told to."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
# For each line it reads: so many seconds of a thread's time, or so many bytes for a moment, or the same in a child.
SPENDER = """
import subprocess, sys, threading, time
def burn(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass
for line in sys.stdin:
    what, number = line.split()
    if what == "burn":
        thread = threading.Thread(target=burn, args=(float(number),))
        thread.start()
        thread.join()
    elif what == "hold":
        bytearray(int(number))
    else:
        code = "import time\\nwhile time.process_time() < " + number + ": pass"
        subprocess.run([sys.executable, "-S", "-c", code], check=True)
    print("done", flush=True)
"""


class Spender:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.pid, self._process = process.pid, process

    def spend(self, what: str, number: float) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(f"{what} {number}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "done\n"


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("meter")


@contextmanager
def running() -> Iterator[Spender]:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-S", "-c", SPENDER], stdin=pipe, stdout=pipe, text=True) as process:
        yield Spender(process)
        assert process.stdin
        process.stdin.close()


@pytest.fixture
def spender() -> Iterator[Spender]:
    with running() as one:
        one.spend("burn", 0.01)
        yield one


def test_time_of_threads_that_have_ended_counts_and_time_before_does_not(meter: ModuleType, spender: Spender) -> None:
    spender.spend("burn", 0.2)
    with meter.Meter(spender.pid) as inside:
        spender.spend("burn", 0.1)
        so_far = inside.cpu_s
        spender.spend("burn", 0.1)
    spender.spend("burn", 0.1)
    assert 0.08 <= so_far <= 0.16
    assert 0.18 <= inside.cpu_s <= 0.3


def test_time_of_children_counts(meter: ModuleType, spender: Spender) -> None:
    with meter.Meter(spender.pid) as inside:
        spender.spend("child", 0.2)
    assert 0.18 <= inside.cpu_s <= 0.4


def test_nothing_is_spent_where_nothing_is_asked(meter: ModuleType, spender: Spender) -> None:
    with meter.Meter(spender.pid) as inside:
        pass
    assert inside.cpu_s <= 0.02
    assert all(seconds <= 0.02 for seconds in inside.cpu_s_by_thread.values())


def test_the_peak_is_that_of_the_stretch_alone(meter: ModuleType, spender: Spender) -> None:
    spender.spend("hold", 120_000_000)
    with meter.Meter(spender.pid) as inside:
        spender.spend("hold", 40_000_000)
    if inside.sampled:
        pytest.skip("the kernel does not let a process set the mark back")
    assert 40 <= inside.peak_rss_mb <= 110


def test_where_the_mark_cannot_be_set_back_memory_is_sampled(
    meter: ModuleType, spender: Spender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meter, "_forget_peak", lambda pid: False)
    with meter.Meter(spender.pid) as inside:
        spender.spend("burn", 0.01)
    assert inside.sampled
    assert 1 <= inside.peak_rss_mb <= 100


def test_a_process_that_is_gone_is_an_error(meter: ModuleType) -> None:
    import psutil

    with running() as one:
        inside = meter.Meter(one.pid)
    with pytest.raises(psutil.NoSuchProcess), inside:
        pass
