"""What of the machine this process may use: cores and memory, within the limits of its control groups (Linux).

A container on a large machine sees all of its cores and memory; what it is allowed stands in its control group, in
version 1 or 2 of that interface.
"""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")
MOST_FILES = 2**16


def usable_cores(root: Path = ROOT) -> int:
    """Cores that the process may keep busy: its affinity, or its quota of processor time rounded up if that is less."""
    quotas = [_quota(folder) for folder in _groups(root, "cpu")]
    return max(1, min(len(os.sched_getaffinity(0)), *(math.ceil(quota) for quota in quotas if quota), 2**20))


def compute_threads(wanted: int = 0) -> int:
    """``wanted``, 0 for all, within the cores that may be used: more threads of a step only wait for one another."""
    return min(wanted or 2**20, usable_cores())


def free_memory(root: Path = ROOT) -> int:
    """Bytes that the process can still get: what the system has available, or what a control group leaves if less."""
    rooms = [_room(folder) for folder in _groups(root, "memory")]
    return max(0, min(_available(root), *(room for room in rooms if room is not None), 2**63))


def limit_tokenizer_threads(threads: int) -> None:
    """At most ``threads`` for the tokenizers' own pool, unless the environment says a number.

    The pool is made at first use, with a thread for each core that the machine has, which in a container may be many
    more than it may use. Call it before any tokenizer is used.
    """
    os.environ.setdefault("RAYON_NUM_THREADS", str(threads))


def allow_many_connections() -> None:
    """Raise the limit of open files, of which each connection is one, as far as the process may.

    The usual 1024 are soon used up by clients that open connections and leave them; then nobody else is let in.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _available(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable")


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of the control groups that the process is in, innermost first; each may set a limit."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / (controller if controllers else "")
        # Inside a container the path may be the host's, of which only the last stop, the top, is there.
        for part in (path.strip("/"), *map(str, Path(path.strip("/")).parents)):
            yield top / part


def _quota(folder: Path) -> float | None:
    """Cores' worth of processor time, None without a limit."""
    second = _read(folder / "cpu.max").split()
    first = [_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")]
    quota, period = second if len(second) == 2 else first
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def _room(folder: Path) -> int | None:
    """Bytes below the limit, counting file cache that would make way as free; None without a limit."""
    for limit_name, usage_name, cache_name in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, usage = _read(folder / limit_name), _read(folder / usage_name)
        if limit.isdigit() and usage.isdigit():
            facts = dict(line.split() for line in _read(folder / "memory.stat").splitlines() if line.count(" ") == 1)
            return int(limit) - int(usage) + int(facts.get(cache_name, 0))
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
