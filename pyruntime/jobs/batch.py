"""Requests that are answered whole, when their last sequence is done: Embed, Score, Classify."""

from __future__ import annotations

import asyncio
from typing import Any

from pyruntime.errors import ComputeFault, InvalidField, PyruntimeError
from pyruntime.jobs.base import Job
from pyruntime.jobs.outbox import Outbox
from pyruntime.scheduler.scheduler import Scheduler
from pyruntime.scheduler.sequence import Sequence
from pyruntime.types import (
    ClassifyRequest,
    ClassifyResult,
    EmbedRequest,
    EmbedResult,
    PoolingType,
    ScoreRequest,
    ScoreResult,
    StepTiming,
    Task,
)

# The query stands before every item in the host's bookkeeping, though it is computed once: 8 bytes a token.
MAX_SCORE_TOKENS = 2**23


class BatchJob(Job):
    """A request with one result a sequence, which all go out together."""

    def __init__(self, sequences: list[Sequence], num_results: int) -> None:
        super().__init__(sequences)
        self.future: asyncio.Future[tuple[list[Any], StepTiming]] = self.loop.create_future()
        self._results: list[Any] = [None] * num_results
        self._num_missing = num_results
        self._error: PyruntimeError | None = None
        self._abandoned = False

    @property
    def done(self) -> bool:
        return self._num_missing == 0 or self._error is not None

    def take(self, sequence: Sequence, output: Any, scheduler: Scheduler) -> None:
        self._results[sequence.index] = self._result(sequence, output)
        self._num_missing -= 1
        scheduler.finish(sequence)

    def fail(self, error: PyruntimeError) -> None:
        self._error = error

    def abandon(self) -> None:
        self._abandoned = True

    def flush(self, outbox: Outbox) -> None:
        if self.done and not self._abandoned:
            outbox.add(self.loop, self._resolve, self.timing())

    def _resolve(self, timing: StepTiming) -> None:
        if self.future.done():
            return
        if self._error is not None:
            self.future.set_exception(self._error)
        else:
            self.future.set_result((self._results, timing))

    def _result(self, sequence: Sequence, output: Any) -> Any:
        raise NotImplementedError


class EmbedJob(BatchJob):
    def __init__(self, request: EmbedRequest) -> None:
        types: list[Any] = request.token_type_ids or [None] * len(request.inputs)
        sequences = [
            Sequence(
                Task.EMBED,
                list(ids),
                request,
                index,
                request.priority,
                token_type_ids=kinds,
                # MEAN and CLS read hidden rows that a cached prefix does not give.
                reuses_prefix=request.pooling is PoolingType.LAST,
            )
            for index, (ids, kinds) in enumerate(zip(request.inputs, types, strict=True))
        ]
        super().__init__(sequences, len(sequences))

    def _result(self, sequence: Sequence, output: Any) -> EmbedResult:
        error = ComputeFault("the embedding is not finite") if output is None else None
        return EmbedResult(output, sequence.num_prompt, sequence.cached_tokens, error)


class ScoreJob(BatchJob):
    """Items behind a common prefix fork from one sequence that computes the prefix once."""

    def __init__(self, request: ScoreRequest) -> None:
        total = sum(len(request.prefix) + len(item) for item in request.items)
        if total > MAX_SCORE_TOKENS:
            problem = f"with the query before each they are {total} tokens; allowed: at most {MAX_SCORE_TOKENS}"
            raise InvalidField("items", problem)
        shared = len(request.items) > 1 and len(request.prefix) > 0
        prefix = Sequence(Task.SCORE, list(request.prefix), request, -1, request.priority, is_prefix=True)
        items = [
            Sequence(Task.SCORE, request.prefix + item, request, i, request.priority, parent=prefix if shared else None)
            for i, item in enumerate(request.items)
        ]
        super().__init__([prefix, *items] if shared else items, len(items))

    def _result(self, sequence: Sequence, output: Any) -> ScoreResult:
        error = ComputeFault("the scores are not finite") if output is None else None
        return ScoreResult(output or [], sequence.num_prompt, sequence.cached_tokens, error)


class ClassifyJob(BatchJob):
    """Inputs behind a common prefix, if there is one, fork from it."""

    def __init__(self, request: ClassifyRequest) -> None:
        types: list[Any] = request.token_type_ids or [None] * len(request.inputs)
        shared = len(request.inputs) > 1 and len(request.prefix) > 0
        prefix = Sequence(Task.CLASSIFY, list(request.prefix), request, -1, request.priority, is_prefix=True)
        inputs = [
            Sequence(
                Task.CLASSIFY,
                request.prefix + ids,
                request,
                index,
                request.priority,
                parent=prefix if shared else None,
                token_type_ids=kinds,
            )
            for index, (ids, kinds) in enumerate(zip(request.inputs, types, strict=True))
        ]
        super().__init__([prefix, *inputs] if shared else inputs, len(inputs))

    def _result(self, sequence: Sequence, output: Any) -> ClassifyResult:
        error = ComputeFault("the scores are not finite") if output is None else None
        return ClassifyResult(output, sequence.num_prompt, sequence.cached_tokens, error)
