"""What the pages of the metrics port are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pyruntime.registry import ModelRegistry
from pyruntime.telemetry.calls import CallStats


@dataclass(frozen=True)
class Sources:
    """One server's. May be read from any thread.

    version      of this package
    is_ready     what overall health says
    loop_lag_s   how long the event loop that runs the calls took to answer, lately
    """

    models: ModelRegistry
    calls: CallStats
    version: str
    is_ready: Callable[[], bool]
    loop_lag_s: Callable[[], float]
