"""What a process costs while something else measures what it does: processor time and memory.

with Meter(server_pid()) as meter:
    ...
meter.cpu_s, meter.peak_rss_mb
"""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

SAMPLE_S = 0.05


def server_pid() -> int:
    """The process that ``running_server`` has started. Raises ``RuntimeError`` where there is none, or several."""
    found = [each.pid for each in psutil.Process().children() if "server.py" in each.cmdline()]
    if len(found) != 1:
        raise RuntimeError(f"expected one server among the children of this process, found {len(found)}")
    return found[0]


class Meter:
    """Processor time and peak memory of a process and its descendants between the two ends of a ``with``.

    ``cpu_s``: seconds, user and system, of all threads, those that have ended included; exact to 0.01 s. A descendant
    counts from the first look on, and one that ends counts if its parent has waited for it. ``peak_rss_mb``: the
    highest resident memory of that stretch, 1 MB = 10^6 bytes. The kernel keeps it where the mark may be set back;
    elsewhere it is the highest of samples 50 ms apart, and ``sampled`` is true. Descendants add their own peaks, so
    that the sum is an upper bound. ``cpu_s_by_thread``: the seconds of the threads that live at the end, summed by
    the name that the system knows them by.

    Inside the ``with`` each tells what it is so far. Raises ``psutil.NoSuchProcess`` when the process is gone.
    """

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self.sampled = False
        self._start_s = 0.0
        self._thread_start_s: dict[int, float] = {}
        self._highest = 0
        self._ended = threading.Event()
        self._sampler: threading.Thread | None = None
        self._result: tuple[float, float, dict[str, float]] | None = None

    def __enter__(self) -> Meter:
        self._result = None
        self.sampled = not all(_forget_peak(each.pid) for each in self._tree())
        if self.sampled:
            self._ended.clear()
            self._highest = self._rss()
            self._sampler = threading.Thread(target=self._sample, daemon=True)
            self._sampler.start()
        self._thread_start_s = {thread.id: thread.user_time + thread.system_time for thread in self._threads()}
        self._start_s = self._total_s()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._sampler is not None:
            self._sampler.join()
            self._sampler = None
        try:
            self._result = self._cpu_now(), self._peak_now(), self._by_thread_now()
        except psutil.NoSuchProcess:
            if error is None:  # or what went wrong inside says more
                raise

    @property
    def cpu_s(self) -> float:
        return self._result[0] if self._result else self._cpu_now()

    @property
    def peak_rss_mb(self) -> float:
        return self._result[1] if self._result else self._peak_now()

    @property
    def cpu_s_by_thread(self) -> dict[str, float]:
        return self._result[2] if self._result else self._by_thread_now()

    def _tree(self) -> list[psutil.Process]:
        return [self._process, *self._process.children(recursive=True)]

    def _total_s(self) -> float:
        total = 0.0
        for each in self._tree():
            try:
                times = each.cpu_times()
            except psutil.NoSuchProcess:
                if each == self._process:
                    raise
                continue  # ended between the two looks: its parent has its time
            total += times.user + times.system + times.children_user + times.children_system
        return total

    def _cpu_now(self) -> float:
        return self._total_s() - self._start_s

    def _threads(self) -> list[Any]:
        return [thread for each in self._tree() if each.is_running() for thread in each.threads()]

    def _by_thread_now(self) -> dict[str, float]:
        by_name: Counter[str] = Counter()
        for thread in self._threads():
            spent = thread.user_time + thread.system_time - self._thread_start_s.get(thread.id, 0.0)
            by_name[_thread_name(thread.id)] += spent
        return dict(by_name)

    def _peak_now(self) -> float:
        if self.sampled:
            self._highest = max(self._highest, self._rss())
            return self._highest / 1e6
        return sum(_peak(each.pid) for each in self._tree()) / 1e6

    def _rss(self) -> int:
        return sum(each.memory_info().rss for each in self._tree() if each.is_running())

    def _sample(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            try:
                self._highest = max(self._highest, self._rss())
            except psutil.NoSuchProcess:
                return


def _forget_peak(pid: int) -> bool:
    """Sets the kernel's mark of the highest resident memory back to what it is now; false where that is refused."""
    try:
        Path(f"/proc/{pid}/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _peak(pid: int) -> int:
    """Bytes at the kernel's mark; nothing of a process that has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


def _thread_name(thread_id: int) -> str:
    try:
        return Path(f"/proc/{thread_id}/comm").read_text().strip()
    except OSError:
        return "ended"
