"""Following that takes long happens on a thread of its own, so that no step waits for it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

# One thread for all models: what is costly is slow by its own choice, and others' steps need the cores.
_thread = ThreadPoolExecutor(1, thread_name_prefix="follow")


def aside(job: Callable[[], None]) -> None:
    """Have ``job`` called on the thread, after those that came before."""
    _thread.submit(job)
