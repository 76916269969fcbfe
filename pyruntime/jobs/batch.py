"""Requests that are answered whole, when their last sequence is done: Embed, Score, Classify."""

from __future__ import annotations

import asyncio
from typing import Any

from pyruntime.errors import ComputeFault, InvalidField, PyruntimeError
from pyruntime.jobs.base import Job
from pyruntime.jobs.outbox import Outbox
from pyruntime.scheduler.scheduler import Scheduler
from pyruntime.scheduler.sequence import Sequence
from pyruntime.scheduler.tokens import SharedTokens
from pyruntime.types import (
    ClassifyRequest,
    ClassifyResult,
    EmbeddingKind,
    EmbedRequest,
    EmbedResult,
    PoolingType,
    ScoreRequest,
    ScoreResult,
    StepTiming,
    Task,
)

# Of all items, each with what it does not share: the host keeps 8 bytes a token.
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
        if output is None:
            scheduler.distrust(sequence)
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
                reuses_prefix=_reads_last_row_alone(request),
            )
            for index, (ids, kinds) in enumerate(zip(request.inputs, types, strict=True))
        ]
        super().__init__(sequences, len(sequences))

    def _result(self, sequence: Sequence, output: Any) -> EmbedResult:
        error = ComputeFault("the embedding is not finite") if output is None else None
        return EmbedResult(output, sequence.num_prompt, sequence.cached_tokens, error)


def _reads_last_row_alone(request: EmbedRequest) -> bool:
    """Whether a cached prefix, which gives no hidden rows, will do for all tokens but the last."""
    return request.kind is EmbeddingKind.DENSE and request.pooling is PoolingType.LAST and not request.skip_rows


class ScoreJob(BatchJob):
    """Items behind a common prefix fork from one sequence that computes the prefix once."""

    def __init__(self, request: ScoreRequest) -> None:
        total = sum(len(item) for item in request.items)
        if total > MAX_SCORE_TOKENS:
            raise InvalidField("items", f"in all they are {total} tokens; allowed: at most {MAX_SCORE_TOKENS}")
        items = [
            Sequence(Task.SCORE, SharedTokens(request.prefix, list(item)), request, index, request.priority)
            for index, item in enumerate(request.items)
        ]
        shared = len(items) > 1 and len(request.prefix) > 0
        super().__init__(_behind_prefix(items, items, request.prefix) if shared else items, len(items))

    def _result(self, sequence: Sequence, output: Any) -> ScoreResult:
        error = ComputeFault("the scores are not finite") if output is None else None
        return ScoreResult(output or [], sequence.num_prompt, sequence.cached_tokens, error)


class ClassifyJob(BatchJob):
    """Inputs behind a common prefix, if there is one, fork from it.

    ``reads_all_rows``: the model classifies each token. As with a delimiter, whose places may be anywhere, every
    hidden row is needed then, so nothing computed earlier will do. ``shares_prefix``: the model has a cache.
    ``ignored_tail_id``: the head reads the last token that is not this one, which may lie in what was computed earlier
    for an input that ends in it.
    """

    def __init__(
        self,
        request: ClassifyRequest,
        *,
        reads_all_rows: bool,
        shares_prefix: bool,
        ignored_tail_id: int | None = None,
    ) -> None:
        types: list[Any] = request.token_type_ids or [None] * len(request.inputs)
        reuses = not reads_all_rows and request.delimiter_token_id is None
        shared = shares_prefix and reuses and len(request.inputs) > 1 and len(request.prefix) > 0
        tokens = [SharedTokens(request.prefix, list(ids)) for ids in request.inputs]
        from_cache = [reuses and each[-1] != ignored_tail_id for each in tokens]
        inputs = [
            Sequence(
                Task.CLASSIFY,
                ids,
                request,
                index,
                request.priority,
                token_type_ids=kinds,
                reuses_prefix=from_cache[index],
            )
            for index, (ids, kinds) in enumerate(zip(tokens, types, strict=True))
        ]
        forking = [each for each in inputs if each.reuses_prefix]
        super().__init__(_behind_prefix(inputs, forking, request.prefix) if shared else inputs, len(inputs))

    def _result(self, sequence: Sequence, output: Any) -> ClassifyResult:
        error = ComputeFault("the scores are not finite") if output is None else None
        return ClassifyResult(output, sequence.num_prompt, sequence.cached_tokens, error)


def _behind_prefix(sequences: list[Sequence], forking: list[Sequence], prefix: list[int]) -> list[Sequence]:
    """``sequences`` of one request behind one that computes the ``prefix`` from which the ``forking`` ones start."""
    first = sequences[0]
    parent = Sequence(first.task, list(prefix), first.payload, -1, first.priority, is_prefix=True)
    for sequence in forking:
        sequence.parent = parent
    return [parent, *sequences]
