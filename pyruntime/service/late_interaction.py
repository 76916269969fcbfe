"""Reranking by vectors a token: the sum over the query's vectors of each one's best match in the document.

MaxSim(q, d) = Σ_i max_j q_i · d_j, in float32 (Khattab and Zaharia 2020, ColBERT, equation 3).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from pyruntime.errors import ComputeFault, InvalidField, PyruntimeError
from pyruntime.service.convert import Stopwatch
from pyruntime.service.distinct import Distinct, distinct
from pyruntime.service.pairs import Ids
from pyruntime.service.queries import as_query
from pyruntime.service.rerank_job import Outcomes, Ranked, RankJob
from pyruntime.telemetry.call_record import current_id
from pyruntime.types import EmbeddingKind, EmbedRequest, EmbedResult, StepTiming

if TYPE_CHECKING:
    from pyruntime.admission import Ticket

# Vectors of documents that are held at a time, and their products with the query's: bytes of float32.
GROUP_BYTES = 64 * 2**20


async def rank_by_tokens(job: RankJob, ticket: Ticket, watch: Stopwatch) -> Outcomes:
    """MaxSim of the query with each document; ``raw_scores`` changes nothing, there is no activation."""
    query, num_unseen, documents = await read_rank_tokens(job)
    total = sum(len(each) for each in documents if isinstance(each, list))
    work: Distinct[list[int]] = await job.room.workers.run(total, distinct, documents, tuple)
    watch.tokenized()
    asking = _vectors(job, [query], as_query=True, num_unseen=num_unseen)
    (asked,), step = await job.model.engine.embed(asking, ticket=ticket)
    if asked.error is not None:
        raise asked.error
    timings, answers = [step], []
    for group in groups(work.inputs, len(query), job.model.info.token_embedding_dimensions):
        found, step = await job.model.engine.embed(_vectors(job, group), ticket=ticket)
        timings.append(step)
        answers += await job.room.workers.run_aside(_ranked_all, np.asarray(asked.values), found)
    queue_s, compute_s = (sum(getattr(each, name) for each in timings) for name in ("queue_s", "compute_s"))
    return work.spread(answers), StepTiming(queue_s, compute_s)


def max_sim(query: np.ndarray, document: np.ndarray) -> float:
    """float32 [Q, D] and [T, D] → the sum over Q of the largest dot product; some rows of Q at a time."""
    rows = max(1, GROUP_BYTES // (4 * len(document)))
    with np.errstate(over="ignore", invalid="ignore"):  # the caller looks
        best = [(query[start : start + rows] @ document.T).max(axis=1) for start in range(0, len(query), rows)]
        return float(np.concatenate(best).sum(dtype=np.float32))


def groups(inputs: list[list[int]], num_query: int, dimensions: int) -> Iterator[list[list[int]]]:
    """Consecutive inputs whose vectors and products take at most ``GROUP_BYTES``; a larger one is alone."""
    group: list[list[int]] = []
    size = 0
    for ids in inputs:
        own = 4 * len(ids) * (dimensions + num_query)
        if group and size + own > GROUP_BYTES:
            yield group
            group, size = [], 0
        group.append(ids)
        size += own
    if group:
        yield group


async def read_rank_tokens(job: RankJob) -> tuple[list[int], int, list[Ids]]:
    """Query and documents with their special tokens, behind the model's prompts named query and document.

    The number is of the query's last tokens that the others do not see.
    """
    info, tokenizer = job.model.info, job.model.tokenizer
    prompts = [info.prompts.get(name, "") for name in ("query", "document")]
    before, after = tokenizer.leading_special_ids, tokenizer.trailing_special_ids
    room = info.context_length - tokenizer.num_special
    query, num_unseen = as_query(job.model, before + await job.read_query(prompts[0]) + after)
    if len(query) > info.context_length:
        raise InvalidField("query", f"has {len(query)} tokens; allowed: at most {info.context_length}")
    return query, num_unseen, await job.read_documents(prompts[1], before, after, room)


def _vectors(job: RankJob, inputs: list[list[int]], *, as_query: bool = False, num_unseen: int = 0) -> EmbedRequest:
    info = job.model.info
    return EmbedRequest(
        inputs=inputs,
        pooling=info.default_pooling,
        normalize=info.normalize_default,
        dimensions=info.token_embedding_dimensions,
        kind=EmbeddingKind.PER_TOKEN,
        priority=job.request.priority,
        request_id=current_id(),
        as_query=as_query,
        unattended=[num_unseen] if num_unseen else None,
    )


def _ranked_all(query: np.ndarray, found: list[EmbedResult]) -> list[Ranked | PyruntimeError]:
    return [_ranked(query, each) for each in found]


def _ranked(query: np.ndarray, answer: EmbedResult) -> Ranked | PyruntimeError:
    if answer.error is not None:
        return answer.error
    document = np.asarray(answer.values)
    if not len(document):
        return InvalidField("documents", "one has no token that the model compares")
    score = max_sim(query, document)
    if not np.isfinite(score):  # each vector is, but products of large ones overflow
        return ComputeFault("the score is not finite")
    return Ranked(score, answer.prompt_tokens, answer.cached_tokens)
