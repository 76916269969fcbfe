"""``/status.json``: the server's state as the status page shows it."""

from __future__ import annotations

import time
from typing import Any

from prometheus_client import ProcessCollector

from pyruntime.engine import EngineLoad
from pyruntime.registry import ModelStatus, ServedModel
from pyruntime.telemetry.collector import num_threads, tasks_of
from pyruntime.telemetry.history import History
from pyruntime.telemetry.sources import Sources

# A failure's reason may quote a long path or a library's message.
LONGEST_FAILURE = 300


class StatusReport:
    """Puts the report together. Nothing of a request's contents is in it: only names, codes and numbers."""

    def __init__(self, sources: Sources, history: History) -> None:
        self._sources = sources
        self._history = history
        self._began_at = time.time()
        self._process = ProcessCollector(registry=None)

    def make(self) -> dict[str, Any]:
        """Times in seconds since 1970, durations in seconds, memory in bytes."""
        now = time.time()
        return {
            "version": self._sources.version,
            "state": self._state(),
            "now": now,
            "uptime_s": now - self._began_at,
            "models": [self._model(each) for each in self._sources.models.statuses()],
            "calls": self._call_counts(),
            "failures": [each._asdict() for each in reversed(dict(self._sources.calls.failures).values())],
            "process": self._of_process(),
        }

    def _state(self) -> str:
        if self._sources.models.is_draining:
            return "draining"
        if self._sources.is_ready():
            return "serving"
        return "starting" if self._sources.models.is_starting else "not serving"

    def _model(self, status: ModelStatus) -> dict[str, Any]:
        shown: dict[str, Any] = {"name": status.name, "state": status.state.value}
        shown["failure"] = status.failure[:LONGEST_FAILURE]
        if status.model is not None:
            shown |= _facts(status.model) | {"load": _load(status.model, status.model.engine.load())}
            shown["curves"] = self._history.curves(status.name)
        return shown

    def _call_counts(self) -> list[dict[str, Any]]:
        ended, running = dict(self._sources.calls.ended), dict(self._sources.calls.running)
        methods = sorted({method for method, _ in ended} | running.keys())
        return [
            {
                "method": method,
                "running": running.get(method, 0),
                "codes": {code: count for (each, code), count in sorted(ended.items()) if each == method},
            }
            for method in methods
        ]

    def _of_process(self) -> dict[str, Any]:
        found = {family.name: family.samples[0].value for family in self._process.collect() if family.samples}
        return {
            "memory_bytes": found.get("process_resident_memory_bytes"),
            "cpu_s": found.get("process_cpu_seconds"),
            "threads": num_threads(),
            "loop_lag_s": self._sources.loop_lag_s(),
        }


def _facts(model: ServedModel) -> dict[str, Any]:
    info = model.info
    return {
        "architecture": info.architecture,
        "dtype": info.dtype,
        "quantization": info.quantization,
        "device": info.device,
        "context_length": info.context_length,
        "capabilities": sorted(each.value for each in info.capabilities),
        "tasks": [task.value for task in tasks_of(model)],
        "weights_bytes": info.weights_bytes,
        "cache_bytes": info.kv_cache_bytes,
    }


def _load(model: ServedModel, load: EngineLoad) -> dict[str, Any]:
    stats, scheduler = model.engine.stats, load.scheduler
    return {
        "open_requests": load.num_requests,
        "queued_tokens": load.num_queued_tokens,
        "steps": load.num_steps,
        "mixed_steps": stats.num_mixed_steps,
        "step_age_s": load.seconds_in_step,
        "paused": scheduler.num_paused,
        "kv_used": scheduler.blocks_used,
        "kv_cached": scheduler.blocks_cached,
        "kv_blocks": scheduler.blocks_used + scheduler.blocks_free,
        "drawn_tokens": stats.num_drawn_tokens,
        "prompt_tokens": sum(stats.prompt_tokens.values()),
        "hit_tokens": sum(stats.hit_tokens.values()),
        "tasks": {
            task.value: {
                "running": scheduler.num_running[task],
                "waiting": scheduler.num_waiting[task],
                "tokens": stats.computed_tokens[task],
                "requests": stats.whole[task].read().num_observed,
            }
            for task in tasks_of(model)
        },
    }
