"""The last ten minutes of each served model: what the status page draws as curves."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from pyruntime.registry import ModelRegistry, ServedModel
from pyruntime.stats import EngineStats, Reading
from pyruntime.types import Task

INTERVAL_S = 5.0
SPAN_S = 600.0
MOST_POINTS = int(SPAN_S / INTERVAL_S)
HALF, NEARLY_ALL = 0.5, 0.95

# A curve's name and what it tells of an interval: tokens a second, or (p50, p95) in seconds, or shares of a whole.
Point = dict[str, Any]


@dataclass(frozen=True)
class _Counts:
    """A model's cumulative numbers at the end of an interval."""

    at: float
    stats: EngineStats
    tokens: dict[Task, int]
    drawn: int
    times: dict[str, Reading]


@dataclass
class _Track:
    before: _Counts
    points: deque[Point] = field(default_factory=lambda: deque(maxlen=MOST_POINTS))


class History:
    """One point a model every ``INTERVAL_S``; a model that goes takes its points with it. For one thread."""

    def __init__(self, models: ModelRegistry) -> None:
        self._models = models
        self._tracks: dict[str, _Track] = {}

    def sample(self, now: float) -> None:
        """Close an interval. ``now``: seconds since 1970."""
        served = {model.info.name: model for model in self._models.serving()}
        for name in self._tracks.keys() - served.keys():
            del self._tracks[name]
        for name, model in served.items():
            counts, track = _read(model, now), self._tracks.get(name)
            if track is None or track.before.stats is not counts.stats:  # new, or loaded anew
                self._tracks[name] = _Track(counts)
            elif now > track.before.at:  # the clock may be set back
                track.points.append(_point(track.before, counts, model))
                track.before = counts
            else:
                track.before = counts

    def curves(self, name: str) -> dict[str, list[Any]]:
        """Each curve's values, oldest first; ``at`` are their times. Empty for a model without points."""
        track = self._tracks.get(name)
        points = list(track.points) if track is not None else []
        return {key: [point.get(key) for point in points] for key in points[-1]} if points else {}


def _read(model: ServedModel, now: float) -> _Counts:
    stats = model.engine.stats
    times = {"first_token": stats.first_token.read(), "token_gap": stats.token_gap.read()}
    times |= {task.value: histogram.read() for task, histogram in stats.whole.items()}
    return _Counts(now, stats, dict(stats.computed_tokens), stats.num_drawn_tokens, times)


def _point(before: _Counts, now: _Counts, model: ServedModel) -> Point:
    seconds = now.at - before.at
    point: Point = {"at": round(now.at, 1), "drawn": _short((now.drawn - before.drawn) / seconds)}
    for task, total in now.tokens.items():
        point[f"{task.value}_tokens"] = _short((total - before.tokens[task]) / seconds)
    for name, reading in now.times.items():
        fresh = reading.since(before.times[name])
        point[f"{name}_p50"] = _short(fresh.quantile(HALF))
        point[f"{name}_p95"] = _short(fresh.quantile(NEARLY_ALL))
    load = model.engine.load().scheduler
    blocks = load.blocks_used + load.blocks_free
    point["kv_used"] = _short(load.blocks_used / blocks) if blocks else None
    point["kv_cached"] = _short(load.blocks_cached / blocks) if blocks else None
    return point


def _short(value: float | None) -> float | None:
    """Four digits are more than a curve shows."""
    return None if value is None else float(f"{value:.4g}")
