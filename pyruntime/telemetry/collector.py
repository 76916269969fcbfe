"""The counters of calls and engines as Prometheus metrics, read when they are asked for."""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from pyruntime.registry import ModelRegistry, ModelState, ServedModel
from pyruntime.stats import Histogram
from pyruntime.telemetry.calls import CallStats
from pyruntime.telemetry.catalog import METRICS, Kind
from pyruntime.types import Capability, Task

TASKS = {
    Capability.GENERATE: Task.GENERATE,
    Capability.EMBED: Task.EMBED,
    Capability.SPARSE_EMBED: Task.EMBED,
    Capability.SCORE: Task.SCORE,
    Capability.CLASSIFY: Task.CLASSIFY,
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

    def put(self, name: str, value: float, *labels: str) -> None:
        self._families[name].add_metric(labels, value)

    def observed(self, name: str, histogram: Histogram, *labels: str) -> None:
        reading = histogram.read()
        buckets = [(floatToGoString(bound), count) for bound, count in reading.published()]
        self._families[name].add_metric(labels, buckets, reading.total)

    def all(self) -> Iterable[Family]:
        return self._families.values()


class RuntimeCollector(Collector):
    """``is_ready``: what overall health says; ``loop_lag_s``: of the event loop that runs the calls."""

    def __init__(
        self,
        models: ModelRegistry,
        calls: CallStats,
        version: str,
        is_ready: Callable[[], bool],
        loop_lag_s: Callable[[], float],
    ) -> None:
        self._models = models
        self._calls = calls
        self._version = version
        self._is_ready = is_ready
        self._loop_lag_s = loop_lag_s

    def describe(self) -> Iterator[Family]:
        return iter(Families().all())

    def collect(self) -> Iterator[Family]:
        found = Families()
        _add_calls(found, self._calls)
        for status in self._models.statuses():
            for state in ModelState:
                found.put("pyruntime_model_state", state is status.state, status.name, state.value)
        for model in self._models.serving():
            _add_model(found, model)
            _add_stats(found, model)
            _add_load(found, model)
        found.put("pyruntime_ready", self._is_ready())
        found.put("pyruntime_event_loop_lag_seconds", self._loop_lag_s())
        found.put("pyruntime_threads", num_threads())
        found.put("pyruntime_build_info", 1, self._version, platform.python_version())
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
        found.observed("pyruntime_request_seconds", histogram, method)
    for method, count in dict(calls.running).items():
        found.put("pyruntime_running_requests", count, method)
    for reason, count in dict(calls.reasons).items():
        found.put("pyruntime_rejections_total", count, reason)


def _add_model(found: Families, model: ServedModel) -> None:
    info = model.info
    found.put("pyruntime_model_info", 1, info.name, info.architecture, info.dtype, info.device)
    found.put("pyruntime_model_weights_bytes", info.weights_bytes, info.name)
    found.put("pyruntime_model_cache_bytes", info.kv_cache_bytes, info.name)


def _add_stats(found: Families, model: ServedModel) -> None:
    name, stats = model.info.name, model.engine.stats
    for task in tasks_of(model):
        found.observed("pyruntime_queue_seconds", stats.queue[task], name, task.value)
        found.observed("pyruntime_inference_seconds", stats.whole[task], name, task.value)
        found.put("pyruntime_batch_tokens_total", stats.computed_tokens[task], name, task.value)
        found.put("pyruntime_prompt_tokens_total", stats.prompt_tokens[task], name, task.value)
        found.put("pyruntime_prefix_hit_tokens_total", stats.hit_tokens[task], name, task.value)
    if Task.GENERATE in tasks_of(model):
        found.observed("pyruntime_time_to_first_token_seconds", stats.first_token, name)
        found.observed("pyruntime_inter_token_seconds", stats.token_gap, name)
    found.observed("pyruntime_step_seconds", stats.step, name)
    found.observed("pyruntime_step_tokens", stats.step_tokens, name)
    found.put("pyruntime_completion_tokens_total", stats.num_drawn_tokens, name)
    found.put("pyruntime_mixed_steps_total", stats.num_mixed_steps, name)
    found.put("pyruntime_failed_inferences_total", stats.num_failed, name)
    found.put("pyruntime_pauses_total", stats.num_pauses, name)


def _add_load(found: Families, model: ServedModel) -> None:
    name, load = model.info.name, model.engine.load()
    scheduler = load.scheduler
    for task in tasks_of(model):
        found.put("pyruntime_waiting_sequences", scheduler.num_waiting[task], name, task.value)
        found.put("pyruntime_waiting_tokens", scheduler.waiting_tokens[task], name, task.value)
        found.put("pyruntime_running_sequences", scheduler.num_running[task], name, task.value)
    empty = scheduler.blocks_free - scheduler.blocks_cached
    for state, count in (("used", scheduler.blocks_used), ("cached", scheduler.blocks_cached), ("free", empty)):
        found.put("pyruntime_kv_blocks", count, name, state)
    found.put("pyruntime_open_requests", load.num_requests, name)
    found.put("pyruntime_queued_tokens", load.num_queued_tokens, name)
    found.put("pyruntime_paused_sequences", scheduler.num_paused, name)
    found.put("pyruntime_draft_tokens_total", scheduler.num_drafted, name)
    found.put("pyruntime_accepted_draft_tokens_total", scheduler.num_accepted, name)
    found.put("pyruntime_preemptions_total", scheduler.num_set_back, name)
    found.put("pyruntime_step_age_seconds", load.seconds_in_step, name)


def tasks_of(model: ServedModel) -> list[Task]:
    """The tasks that the model's capabilities name, and those that it has computed, as reranking is any of three."""
    able = {TASKS[each] for each in model.info.capabilities if each in TASKS}
    return [task for task in Task if task in able or model.engine.stats.computed_tokens[task]]
