"""Typed wrappers over the compiled kernels, one small module each. ``build_info`` tells what was built."""

from __future__ import annotations

from pyruntime.ops import _library, attention, between, cache, linear, pooling, quantized, sampling, scores, screen

build_info = _library.build_info

__all__ = [
    "attention",
    "between",
    "build_info",
    "cache",
    "linear",
    "pooling",
    "quantized",
    "sampling",
    "scores",
    "screen",
]
