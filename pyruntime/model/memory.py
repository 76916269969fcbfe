"""Gives memory that no tensor uses any more back to the system."""

from __future__ import annotations

import contextlib
import ctypes

import torch


def release_memory() -> None:
    """Of the allocators of torch and of the C library, both of which keep what was freed for later."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    with contextlib.suppress(OSError, AttributeError):  # a C library other than GNU's
        ctypes.CDLL(None).malloc_trim(0)
