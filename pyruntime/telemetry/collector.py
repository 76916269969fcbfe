"""The counters of calls and engines as Prometheus metrics, read when they are asked for."""

from __future__ import annotations

import platform
import threading
from collections.abc import Iterable, Iterator
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace

from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from pyruntime.registry import ModelState, ServedModel
from pyruntime.stats import Histogram
from pyruntime.telemetry.calls import CallStats
from pyruntime.telemetry.catalog import METRICS, Kind
from pyruntime.telemetry.sources import Sources
from pyruntime.types import Capability, Task

TASKS = {
    Capability.GENERATE: Task.GENERATE,
    Capability.EMBED: Task.EMBED,
    Capability.SPARSE_EMBED: Task.EMBED,
    Capability.SCORE: Task.SCORE,
    Capability.CLASSIFY: Task.CLASSIFY,
}


# Which number of a model's ``info``, ``stats`` or ``load`` a metric shows: by task, of those that generate, of all.
BY_TASK = {
    "pyruntime_queue_seconds": "stats.queue",
    "pyruntime_inference_seconds": "stats.whole",
    "pyruntime_batch_tokens_total": "stats.computed_tokens",
    "pyruntime_prompt_tokens_total": "stats.prompt_tokens",
    "pyruntime_prefix_hit_tokens_total": "stats.hit_tokens",
    "pyruntime_waiting_sequences": "load.scheduler.num_waiting",
    "pyruntime_waiting_tokens": "load.scheduler.waiting_tokens",
    "pyruntime_running_sequences": "load.scheduler.num_running",
}
OF_GENERATION = {
    "pyruntime_time_to_first_token_seconds": "stats.first_token",
    "pyruntime_inter_token_seconds": "stats.token_gap",
}
OF_ALL = {
    "pyruntime_model_weights_bytes": "info.weights_bytes",
    "pyruntime_model_cache_bytes": "info.kv_cache_bytes",
    "pyruntime_step_seconds": "stats.step",
    "pyruntime_step_tokens": "stats.step_tokens",
    "pyruntime_completion_tokens_total": "stats.num_drawn_tokens",
    "pyruntime_mixed_steps_total": "stats.num_mixed_steps",
    "pyruntime_failed_inferences_total": "stats.num_failed",
    "pyruntime_pauses_total": "stats.num_pauses",
    "pyruntime_open_requests": "load.num_requests",
    "pyruntime_queued_tokens": "load.num_queued_tokens",
    "pyruntime_step_age_seconds": "load.seconds_in_step",
    "pyruntime_paused_sequences": "load.scheduler.num_paused",
    "pyruntime_draft_tokens_total": "load.scheduler.num_drafted",
    "pyruntime_accepted_draft_tokens_total": "load.scheduler.num_accepted",
    "pyruntime_preemptions_total": "load.scheduler.num_set_back",
}


class Families:
    """One empty family a metric of the catalogue, filled by name. An unknown name raises ``KeyError``."""

    def __init__(self) -> None:
        kinds = {
            Kind.COUNTER: CounterMetricFamily,
            Kind.GAUGE: GaugeMetricFamily,
            Kind.HISTOGRAM: HistogramMetricFamily,
        }
        self._families = {each.name: kinds[each.kind](each.name, each.help, labels=each.labels) for each in METRICS}

    def put(self, name: str, value: float | Histogram, *labels: str) -> None:
        if isinstance(value, Histogram):
            reading = value.read()
            buckets = [(floatToGoString(bound), count) for bound, count in reading.published()]
            self._families[name].add_metric(labels, buckets, reading.total)
        else:
            self._families[name].add_metric(labels, value)

    def all(self) -> Iterable[Family]:
        return self._families.values()


class RuntimeCollector(Collector):
    """Every metric of the catalogue, from what ``sources`` say now."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources

    def describe(self) -> Iterator[Family]:
        return iter(Families().all())

    def collect(self) -> Iterator[Family]:
        found, of = Families(), self._sources
        _add_calls(found, of.calls)
        for status in of.models.statuses():
            for state in ModelState:
                found.put("pyruntime_model_state", state is status.state, status.name, state.value)
        for model in of.models.serving():
            _add_model(found, model)
        found.put("pyruntime_ready", of.is_ready())
        found.put("pyruntime_event_loop_lag_seconds", of.loop_lag_s())
        found.put("pyruntime_threads", num_threads())
        found.put("pyruntime_build_info", 1, of.version, platform.python_version())
        yield from found.all()


def make_registry(collector: Collector) -> CollectorRegistry:
    """The metrics of one server: its own, and the usual ones of a process and its garbage collector."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    ProcessCollector(registry=registry)
    GCCollector(registry=registry)
    return registry


def num_threads() -> int:
    """Threads of the process, those of libraries included where the system tells."""
    try:
        return sum(1 for _ in Path("/proc/self/task").iterdir())
    except OSError:
        return threading.active_count()


def _add_calls(found: Families, calls: CallStats) -> None:
    for (method, code), count in dict(calls.ended).items():
        found.put("pyruntime_requests_total", count, method, code)
    for method, histogram in dict(calls.seconds).items():
        found.put("pyruntime_request_seconds", histogram, method)
    for method, count in dict(calls.running).items():
        found.put("pyruntime_running_requests", count, method)
    for reason, count in dict(calls.reasons).items():
        found.put("pyruntime_rejections_total", count, reason)


def _add_model(found: Families, model: ServedModel) -> None:
    info, tasks = model.info, tasks_of(model)
    shown = SimpleNamespace(info=info, stats=model.engine.stats, load=model.engine.load())
    of_it = OF_ALL | (OF_GENERATION if Task.GENERATE in tasks else {})
    for metric, path in of_it.items():
        found.put(metric, attrgetter(path)(shown), info.name)
    for metric, path in BY_TASK.items():
        for task in tasks:
            found.put(metric, attrgetter(path)(shown)[task], info.name, task.value)
    blocks = shown.load.scheduler
    empty = blocks.blocks_free - blocks.blocks_cached
    for state, count in (("used", blocks.blocks_used), ("cached", blocks.blocks_cached), ("free", empty)):
        found.put("pyruntime_kv_blocks", count, info.name, state)
    facts = info.architecture, info.dtype, info.quantization, info.device
    found.put("pyruntime_model_info", 1, info.name, *facts)


def tasks_of(model: ServedModel) -> list[Task]:
    """The tasks that the model's capabilities name, and those that it has computed, as reranking is any of three."""
    able = {TASKS[each] for each in model.info.capabilities if each in TASKS}
    return [task for task in Task if task in able or model.engine.stats.computed_tokens[task]]
