"""A cache of prepared model folders: each is made once, whole or not at all, whoever asks first."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

Progress = Callable[[str], None]


def cache_root() -> Path:
    """``PYRUNTIME_CACHE_DIR``, else ``$XDG_CACHE_HOME/pyruntime``, else ``~/.cache/pyruntime``."""
    if explicit := os.environ.get("PYRUNTIME_CACHE_DIR"):
        return Path(explicit).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "pyruntime"


def prepared_folder(key: str) -> Path | None:
    """The folder that an earlier ``prepare_once(key, …)`` made, or None."""
    folder = cache_root() / "models" / key
    return folder if folder.is_dir() else None


def prepare_once(key: str, make: Callable[[Path], None], progress: Progress) -> Path:
    """The folder of ``key``, made by ``make(empty folder)`` unless it is there already.

    Safe between threads and processes: the second waits for the first. A ``make`` that raises leaves
    nothing behind, and a killed one leaves only a temporary folder that the next caller removes.
    """
    if folder := prepared_folder(key):
        return folder
    parent = cache_root() / "models"
    parent.mkdir(parents=True, exist_ok=True)
    with _locked(parent / f".{key}.lock", progress):
        if folder := prepared_folder(key):
            return folder
        for leftover in parent.glob(f".{key}.tmp-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        working = Path(tempfile.mkdtemp(prefix=f".{key}.tmp-", dir=parent))
        try:
            make(working)
            working.rename(parent / key)
        except BaseException:
            shutil.rmtree(working, ignore_errors=True)
            raise
    return parent / key


@contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("another process is preparing this model; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
