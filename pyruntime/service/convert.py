"""From our types to protobuf: usage, timing, models."""

from __future__ import annotations

import time
from typing import Any

from google.protobuf import duration_pb2

from pyruntime.config import Settings
from pyruntime.registry import ServedModel
from pyruntime.telemetry.call_record import current_call
from pyruntime.types import Capability, EmbeddingKind, ExecutionPath, PoolingType, StepTiming
from pyruntime.v1 import common_pb2, embed_pb2, model_pb2

POOLING_OF = {
    embed_pb2.POOLING_LAST: PoolingType.LAST,
    embed_pb2.POOLING_CLS: PoolingType.CLS,
    embed_pb2.POOLING_MEAN: PoolingType.MEAN,
}
POOLING_PB = {pooling: number for number, pooling in POOLING_OF.items()}
CAPABILITY_PB: dict[Capability, Any] = {
    each: model_pb2.Capability.Value(f"CAPABILITY_{each.value}") for each in Capability
}
KIND_PB: dict[EmbeddingKind, Any] = {
    each: embed_pb2.EmbeddingKind.Value(f"EMBEDDING_KIND_{each.name}") for each in EmbeddingKind
}
PATH_PB: dict[ExecutionPath, Any] = {
    each: model_pb2.ExecutionPath.Value(f"EXECUTION_PATH_{each.name}") for each in ExecutionPath
}


class Stopwatch:
    """Times a request from its arrival, and tells the record of its call where the time went."""

    def __init__(self) -> None:
        self._call = current_call()
        self._started = time.perf_counter()
        self._tokenized_s = 0.0
        self._ready = self._started

    def tokenized(self) -> None:
        """Tokenising has just ended."""
        self._ready = now = time.perf_counter()
        self._tokenized_s = now - self._started
        if self._call is not None:
            self._call.tokenize_s += self._tokenized_s
            self._call.add_stage("tokenize", self._started, now)

    def constrained(self) -> None:
        """What the text must conform to has just been compiled, after tokenising."""
        now = time.perf_counter()
        if self._call is not None:
            self._call.add_stage("constrain", self._ready, now)
        self._ready = now

    def stamp(self, response: Any, step: StepTiming) -> None:
        """Put the timing into the response, which has its usage and nothing else to be computed."""
        response.timing.CopyFrom(self.timing(step))
        self.ended(step, response.usage)
        if self._call is not None and step.compute_s:
            self._call.add_stage("encode", self._ready + step.queue_s + step.compute_s, time.perf_counter())

    def ended(self, step: StepTiming, used: common_pb2.Usage) -> None:
        """The request has left the engine, answered or not, which it had been given when it was ready.

        One whose first token is known ran in two stages, any other in one, and one that never ran in none.
        """
        if (call := self._call) is None:
            return
        call.queue_s += step.queue_s
        call.compute_s += step.compute_s
        call.add_usage(used.prompt_tokens, used.completion_tokens, used.cached_tokens)
        running = self._ready + step.queue_s
        done = running + step.compute_s
        call.add_stage("queue", self._ready, running)
        if not step.compute_s:
            return
        if step.prefill_s is None:
            call.add_stage("compute", running, done)
        else:
            call.add_stage("prefill", running, running + step.prefill_s)
            call.add_stage("decode", running + step.prefill_s, done)

    def timing(self, step: StepTiming) -> common_pb2.Timing:
        return common_pb2.Timing(
            tokenize=duration(self._tokenized_s),
            queue=duration(step.queue_s),
            compute=duration(step.compute_s),
            total=duration(time.perf_counter() - self._started),
        )


def duration(seconds: float) -> duration_pb2.Duration:
    whole, nanoseconds = divmod(max(0, round(seconds * 1e9)), 1_000_000_000)
    return duration_pb2.Duration(seconds=whole, nanos=nanoseconds)


def model_message(model: ServedModel, settings: Settings) -> model_pb2.Model:
    """What ``GetModel`` tells."""
    info = model.info
    kinds = info.embedding_kinds if info.capabilities & {Capability.EMBED, Capability.SPARSE_EMBED} else frozenset()
    dense = EmbeddingKind.DENSE in kinds
    message = model_pb2.Model(
        name=info.name,
        architecture=info.architecture,
        dtype=info.dtype,
        device=info.device,
        capabilities=sorted(CAPABILITY_PB[each] for each in info.capabilities),
        context_length=info.context_length,
        vocab_size=info.vocab_size,
        embedding_dimensions=info.embedding_dimensions if dense else 0,
        pooling=POOLING_PB[info.default_pooling] if dense else embed_pb2.POOLING_UNSPECIFIED,
        normalize=bool(kinds) and info.normalize_default,
        prompts=info.prompts,
        labels=info.labels,
        kv_cache_tokens=info.kv_cache_tokens,
        limits=limits_message(settings),
        embedding_kinds=sorted(KIND_PB[each] for each in kinds),
        token_embedding_dimensions=info.token_embedding_dimensions,
        similarity=info.similarity,
        classifies_tokens=info.classifies_tokens,
        execution_path=PATH_PB[info.execution_path],
        weights_bytes=info.weights_bytes,
        kv_cache_bytes=info.kv_cache_bytes,
        quantization=info.quantization,
    )
    if info.default_prompt_name is not None:
        message.default_prompt_name = info.default_prompt_name
    return message


def limits_message(settings: Settings) -> model_pb2.Limits:
    return model_pb2.Limits(
        max_message_bytes=settings.max_message_bytes,
        max_inputs_per_request=settings.max_inputs_per_request,
        max_text_bytes=settings.max_text_bytes,
        max_labels_per_request=settings.max_labels_per_request,
        max_scores_per_request=settings.max_scores_per_request,
        max_request_text_bytes=settings.max_request_text_bytes,
    )


def usage(results: list[Any]) -> common_pb2.Usage:
    """Summed over the results of an embed or score request that have no error."""
    good = [result for result in results if result.error is None]
    return common_pb2.Usage(
        prompt_tokens=sum(result.prompt_tokens for result in good),
        cached_tokens=sum(result.cached_tokens for result in good),
    )
