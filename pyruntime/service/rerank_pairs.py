"""Reranking by a classifier of one label, which reads query and document as a pair (cross-encoders)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyruntime.errors import CapabilityMissing, InvalidField, PyruntimeError
from pyruntime.registry import ServedModel
from pyruntime.service.convert import Stopwatch
from pyruntime.service.distinct import distinct
from pyruntime.service.pairs import Encoded, Ids, classify_request, join, num_ids, room_behind
from pyruntime.service.rerank_job import Outcomes, Ranked, RankJob
from pyruntime.service.score_heads import check_total_tokens
from pyruntime.tokenization import PairFrame
from pyruntime.types import ClassifyResult

if TYPE_CHECKING:
    from pyruntime.admission import Ticket


async def rank_by_pairs(job: RankJob, ticket: Ticket, watch: Stopwatch) -> Outcomes:
    """The head's output for each pair: through the model's own activation, or with ``raw_scores`` as it is."""
    read = await read_rank_pairs(job)
    work = await job.room.workers.run(num_ids(read), distinct, read, Encoded.key)
    watch.tokenized()
    answers, step = await job.model.engine.classify(classify_request(work.inputs, job.request), ticket=ticket)
    return [ranked(each) for each in work.spread(answers)], step


async def read_rank_pairs(job: RankJob) -> list[Encoded | InvalidField]:
    """Query and document in the tokenizer's frame for pairs, the query encoded once."""
    frame = _frame(job.model)
    query = await job.read_query()
    room = room_behind(job.model, frame, query, "query")
    documents = await job.read_documents("", [], [], room)
    total = check_total_tokens("documents", documents, num_each=len(query))
    return await job.room.workers.run(total, _join_all, job.model, frame, query, documents)


def _join_all(
    model: ServedModel, frame: PairFrame, query: list[int], documents: list[Ids]
) -> list[Encoded | InvalidField]:
    return [each if isinstance(each, InvalidField) else join(model, frame, query, each) for each in documents]


def ranked(answer: ClassifyResult | PyruntimeError) -> Ranked | PyruntimeError:
    """The outcome of a document whose head gives one number."""
    if isinstance(answer, PyruntimeError):
        return answer
    return Ranked(float(answer.scores[0]), answer.prompt_tokens, answer.cached_tokens)


def _frame(model: ServedModel) -> PairFrame:
    frame = model.tokenizer.pair_frame
    if frame is None:
        problem = "its tokenizer knows no pairs; a rerank_template.json in its folder would say how it reads them"
        raise CapabilityMissing(f"model {model.info.name!r} cannot rerank: {problem}")
    return frame
