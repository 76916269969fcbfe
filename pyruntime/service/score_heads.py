"""The two ways a Score is computed: labels of the next token, or the head of a decoder made to classify sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from pyruntime.errors import InvalidField
from pyruntime.jobs.batch import MAX_SCORE_TOKENS
from pyruntime.registry import ServedModel
from pyruntime.service.validate import optional
from pyruntime.telemetry.call_record import current_id
from pyruntime.types import Capability, ClassifyRequest, ClassifyResult, ScoreRequest, ScoreResult, StepTiming, Task
from pyruntime.v1 import score_pb2

if TYPE_CHECKING:
    from pyruntime.admission import Ticket

Answers = tuple[list[ScoreResult], StepTiming]


def has_classifier(model: ServedModel) -> bool:
    """Whether the scores are those of the model's own labels, so that a request has none."""
    return Capability.CLASSIFY in model.info.capabilities


def check_total_tokens(field: str, items: Sequence[list[int] | InvalidField], num_each: int = 0) -> int:
    """Tokens of the items, each with ``num_each`` of its own copy of the query. ``InvalidField`` for too many."""
    total = sum(num_each + len(each) for each in items if isinstance(each, list))
    if total > MAX_SCORE_TOKENS:
        problem = f"in all they are {total} tokens; allowed: at most {MAX_SCORE_TOKENS}"
        raise InvalidField(field, problem)
    return total


def score_task(model: ServedModel) -> Task:
    """Which task of the engine scores."""
    return Task.CLASSIFY if has_classifier(model) else Task.SCORE


async def score_by_labels(
    model: ServedModel,
    request: score_pb2.ScoreRequest,
    prefix: list[int],
    items: list[list[int]],
    label_ids: list[int],
    ticket: Ticket,
) -> Answers:
    """Probabilities of ``label_ids`` behind prefix and item."""
    job = ScoreRequest(
        prefix=prefix,
        items=items,
        label_ids=label_ids,
        apply_softmax=request.apply_softmax,
        temperature=optional(request, "temperature", 1.0),
        priority=request.priority,
        request_id=current_id(),
    )
    return await model.engine.score(job, ticket=ticket)


async def score_by_head(
    model: ServedModel, request: score_pb2.ScoreRequest, prefix: list[int], items: list[list[int]], ticket: Ticket
) -> Answers:
    """The head's output at the last token of prefix and item: as it is, or softmax(output / temperature)."""
    job = ClassifyRequest(inputs=items, raw=True, prefix=prefix, priority=request.priority, request_id=current_id())
    answers, step = await model.engine.classify(job, ticket=ticket)
    temperature = optional(request, "temperature", 1.0) if request.apply_softmax else None
    return [_scores(each, temperature) for each in answers], step


def _scores(answer: ClassifyResult, temperature: float | None) -> ScoreResult:
    if answer.error is not None:
        return ScoreResult([], answer.prompt_tokens, answer.cached_tokens, answer.error)
    scores = np.asarray(answer.scores, np.float64)
    if temperature is not None:
        # Below the normal numbers of float32 the answer is one-hot already.
        scores = np.exp((scores - scores.max()) / max(temperature, np.finfo(np.float32).tiny))
        scores /= scores.sum()
    return ScoreResult(scores.tolist(), answer.prompt_tokens, answer.cached_tokens)
