"""Cores and memory within control groups, read from files as each version of the interface lays them out."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from pyruntime.machine import MOST_FILES, allow_many_connections, free_memory, limit_tokenizer_threads, usable_cores

GIB = 2**30
CORES = len(os.sched_getaffinity(0))


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in ({"proc/meminfo": "MemTotal: 9 kB\nMemAvailable:  8388608 kB"} | files).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


def test_without_control_groups(tmp_path: Path) -> None:
    root = machine(tmp_path, {})
    assert free_memory(root) == 8 * GIB
    assert usable_cores(root) == CORES


def test_this_machine() -> None:
    assert 0 < free_memory() < 2**50
    assert 1 <= usable_cores() <= CORES


def test_version_2_where_an_outer_group_ends_first(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/pod/box"
    files = {
        "proc/self/cgroup": "0::/pod/box",
        f"{group}/memory.max": "max",
        f"{group}/memory.current": "1",
        f"{group}/cpu.max": "max 100000",
        "sys/fs/cgroup/pod/memory.max": str(4 * GIB),
        "sys/fs/cgroup/pod/memory.current": str(3 * GIB),
        "sys/fs/cgroup/pod/memory.stat": f"anon 5\ninactive_file {GIB}",
        "sys/fs/cgroup/pod/cpu.max": "50000 100000",
    }
    root = machine(tmp_path, files)
    assert free_memory(root) == 2 * GIB  # 1 to the limit, 1 of file cache that makes way
    assert usable_cores(root) == 1


def test_version_1_whose_path_is_the_hosts(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "9:cpuset:/\n4:memory:/host/path\n2:cpu,cpuacct:/host/path\n0::/",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2 * GIB),
        "sys/fs/cgroup/memory/memory.usage_in_bytes": str(GIB),
        "sys/fs/cgroup/memory/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB // 2}",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
    }
    root = machine(tmp_path, files)
    assert free_memory(root) == GIB + GIB // 2
    assert usable_cores(root) == CORES


def test_a_group_over_its_limit_has_nothing_free(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/",
        "sys/fs/cgroup/memory.max": "10",
        "sys/fs/cgroup/memory.current": "20",
    }
    assert free_memory(machine(tmp_path, files)) == 0


@pytest.mark.parametrize(
    ("soft", "hard", "after"),
    [
        (1024, 4096, 4096),
        (1024, 10**6, MOST_FILES),
        (1024, resource.RLIM_INFINITY, MOST_FILES),
        (MOST_FILES, 10**6, None),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, None),
        (4096, 4096, None),
    ],
)
def test_open_files_as_far_as_allowed(monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, after: int | None) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: asked.append(limits))
    allow_many_connections()
    assert asked == ([] if after is None else [(after, hard)])


def test_the_environment_has_the_last_word_on_tokenizer_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYON_NUM_THREADS", "7")
    limit_tokenizer_threads(3)
    assert os.environ["RAYON_NUM_THREADS"] == "7"
    monkeypatch.delenv("RAYON_NUM_THREADS")
    limit_tokenizer_threads(3)
    assert os.environ["RAYON_NUM_THREADS"] == "3"
