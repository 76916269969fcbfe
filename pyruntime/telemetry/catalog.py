"""Every metric of this project: name, kind, labels, meaning. ``docs/metrics.md`` lists the same, checked by a test.

Names as Prometheus has them: base units, ``_total`` for what only grows. Every label has few values: models that are
served now, the tasks, this server's own methods, gRPC's codes, this project's reasons.
"""

from __future__ import annotations

import enum
from typing import NamedTuple


class Kind(enum.Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Metric(NamedTuple):
    """``name`` as it is exposed, a counter's with ``_total``."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    help: str


C, G, H = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM
MODEL, TASK = ("model",), ("model", "task")

METRICS: tuple[Metric, ...] = (
    # Calls, as gRPC sees them.
    Metric("pyruntime_requests_total", C, ("method", "code"), "Calls that have ended, by full method and gRPC code."),
    Metric("pyruntime_request_seconds", H, ("method",), "From a call's arrival to its end."),
    Metric("pyruntime_running_requests", G, ("method",), "Calls that have arrived and not ended."),
    Metric("pyruntime_rejections_total", C, ("reason",), "Calls ended by an error, by its ErrorInfo reason."),
    # Requests inside an engine.
    Metric("pyruntime_queue_seconds", H, TASK, "From the end of tokenising to a request's first step."),
    Metric("pyruntime_time_to_first_token_seconds", H, MODEL, "From admission to the step that drew the first token."),
    Metric("pyruntime_inter_token_seconds", H, MODEL, "Between two tokens of one text, waits for its client apart."),
    Metric("pyruntime_inference_seconds", H, TASK, "From admission, before tokenising, to a request's last result."),
    Metric("pyruntime_failed_inferences_total", C, MODEL, "Requests ended by a forward that failed."),
    # Steps.
    Metric("pyruntime_step_seconds", H, MODEL, "One step, its wait for the device included."),
    Metric("pyruntime_step_tokens", H, MODEL, "Tokens computed in one step."),
    Metric("pyruntime_batch_tokens_total", C, TASK, "Tokens computed in steps, those computed again included."),
    Metric("pyruntime_mixed_steps_total", C, MODEL, "Steps that computed tokens of more than one task."),
    Metric("pyruntime_step_age_seconds", G, MODEL, "How long the forward that runs now has been at it; 0: none runs."),
    # Tokens.
    Metric("pyruntime_prompt_tokens_total", C, TASK, "Prompt tokens computed or found cached, a shared prefix once."),
    Metric("pyruntime_prefix_hit_tokens_total", C, TASK, "Of the prompt tokens, those that the prefix cache held."),
    Metric("pyruntime_completion_tokens_total", C, MODEL, "Tokens drawn."),
    Metric("pyruntime_draft_tokens_total", C, MODEL, "Tokens proposed by prompt lookup."),
    Metric("pyruntime_accepted_draft_tokens_total", C, MODEL, "Of them, those that the model drew as well."),
    # Load.
    Metric("pyruntime_open_requests", G, MODEL, "Requests admitted and not yet answered."),
    Metric("pyruntime_queued_tokens", G, MODEL, "Prompt tokens that wait, texts still to be tokenised estimated."),
    Metric("pyruntime_waiting_sequences", G, TASK, "Sequences that are queued or wait for their parent's prompt."),
    Metric("pyruntime_waiting_tokens", G, TASK, "Tokens to be computed for the waiting sequences."),
    Metric("pyruntime_running_sequences", G, TASK, "Sequences in the batch."),
    Metric("pyruntime_paused_sequences", G, MODEL, "Sequences whose client does not read."),
    Metric("pyruntime_pauses_total", C, MODEL, "How often a stream had to wait for its client."),
    Metric("pyruntime_preemptions_total", C, MODEL, "How often a sequence gave up its cache blocks."),
    Metric(
        "pyruntime_kv_blocks",
        G,
        ("model", "state"),
        "Cache blocks: used, cached (free, but worth keeping), free.",
    ),
    # Models and process.
    Metric("pyruntime_model_state", G, ("model", "state"), "1 for the state that the model is in, 0 for the others."),
    Metric("pyruntime_model_info", G, ("model", "architecture", "dtype", "quantization", "device"), "Always 1."),
    Metric("pyruntime_model_weights_bytes", G, MODEL, "Memory of the weights."),
    Metric("pyruntime_model_cache_bytes", G, MODEL, "Memory of the key/value cache."),
    Metric("pyruntime_ready", G, (), "1 while the server takes requests, as overall health says."),
    Metric("pyruntime_event_loop_lag_seconds", G, (), "How long the event loop of the calls took to answer, lately."),
    Metric("pyruntime_threads", G, (), "Threads of the process."),
    Metric("pyruntime_build_info", G, ("version", "python"), "Always 1."),
)
