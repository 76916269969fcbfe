"""Reranking by a decoder's template: what stands before the document is computed once for all documents."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyruntime.control_tokens import MarkedText
from pyruntime.errors import InvalidField, PyruntimeError
from pyruntime.registry import ServedModel
from pyruntime.rerank_template import RerankTemplate, fill
from pyruntime.service.convert import Stopwatch
from pyruntime.service.distinct import Distinct, distinct
from pyruntime.service.inputs import known_ids
from pyruntime.service.pairs import Ids
from pyruntime.service.rerank_job import Outcomes, Ranked, RankJob
from pyruntime.service.rerank_pairs import ranked
from pyruntime.service.score_heads import check_total_tokens, has_classifier
from pyruntime.service.validate import text_bytes
from pyruntime.telemetry.call_record import current_id
from pyruntime.types import ClassifyRequest, ScoreRequest, ScoreResult

if TYPE_CHECKING:
    from pyruntime.admission import Ticket


@dataclass(frozen=True)
class Prompt:
    """Token ids: ``before`` stands before every document, each of ``items`` is one with what comes behind it."""

    before: list[int]
    items: list[Ids]


async def rank_by_template(job: RankJob, ticket: Ticket, watch: Stopwatch) -> Outcomes:
    """sigmoid of the labels' logits as the template says, or with ``raw_scores`` themselves; or the head's output."""
    prompt = await read_rank_prompt(job)
    total = check_total_tokens("documents", prompt.items)
    work: Distinct[list[int]] = await job.room.workers.run(total, distinct, prompt.items, tuple)
    watch.tokenized()
    return await (_by_head if has_classifier(job.model) else _by_labels)(job, ticket, prompt, work)


async def _by_labels(job: RankJob, ticket: Ticket, prompt: Prompt, work: Distinct[list[int]]) -> Outcomes:
    template = _template(job.model)
    request = ScoreRequest(
        prefix=prompt.before,
        items=work.inputs,
        label_ids=list(template.label_ids),
        apply_softmax=True,
        priority=job.request.priority,
        request_id=current_id(),
        raw=True,
    )
    answers, step = await job.model.engine.score(request, ticket=ticket)
    raw = job.request.raw_scores or template.activation == "identity"
    return [_of_logits(each, raw) for each in work.spread(answers)], step


async def _by_head(job: RankJob, ticket: Ticket, prompt: Prompt, work: Distinct[list[int]]) -> Outcomes:
    request = ClassifyRequest(
        inputs=work.inputs,
        raw=job.request.raw_scores,
        prefix=prompt.before,
        priority=job.request.priority,
        request_id=current_id(),
    )
    answers, step = await job.model.engine.classify(request, ticket=ticket)
    return [ranked(each) for each in work.spread(answers)], step


def _of_logits(answer: ScoreResult | PyruntimeError, raw: bool) -> Ranked | PyruntimeError:
    if isinstance(answer, PyruntimeError):
        return answer
    logit = answer.scores[0] - (answer.scores[1] if len(answer.scores) > 1 else 0.0)
    return Ranked(logit if raw else sigmoid(logit), answer.prompt_tokens, answer.cached_tokens)


def sigmoid(value: float) -> float:
    """1 / (1 + exp(-value)), without overflow."""
    if value >= 0:
        return 1 / (1 + math.exp(-value))
    return math.exp(value) / (1 + math.exp(value))


async def read_rank_prompt(job: RankJob) -> Prompt:
    """The template's pieces around query and documents, each piece tokenised on its own.

    Control tokens are the template's own: their names in what the request says are text.
    """
    template, workers = _template(job.model), job.room.workers
    frame = template.document.removesuffix("{document}")
    pieces = [*template.before, *template.after, frame.rstrip()]
    said = {"query": job.request.query}
    if job.request.HasField("instruction"):
        said["instruction"] = job.request.instruction
    num_bytes = sum(map(text_bytes, (*pieces, *said.values())))
    *encoded, own = await workers.run(num_bytes, _encode_pieces, job.model, pieces, said)
    before = job.model.tokenizer.leading_special_ids if template.leading_special_tokens else []
    for ids in encoded[: len(template.before)]:
        before += ids
    after = [token_id for ids in encoded[len(template.before) :] for token_id in ids]
    room = job.model.info.context_length - len(before) - len(after)
    if room <= len(own):
        beside = len(own) + len(after)
        problem = f"makes {len(before)} tokens with the template, beside {beside} around the document; allowed: "
        raise InvalidField("query", problem + f"at most {job.model.info.context_length - 1} together")
    control = job.model.tokenizer.control_tokens(template.text)
    return Prompt(before, await job.read_documents(frame, [], after, room, control))


def _encode_pieces(model: ServedModel, pieces: list[str], said: dict[str, str]) -> list[list[int]]:
    """The template's ``pieces``, filled in with what the request ``said``, else with the template's own."""
    template = _template(model)
    control = model.tokenizer.control_tokens(template.text)
    try:
        marked, marks = control.mark_values(said)
        values = {"instruction": template.instruction or "", **marked}
        return [known_ids(model, control.ids(MarkedText(fill(piece, values), marks)), "query") for piece in pieces]
    except InvalidField as error:
        raise InvalidField("query", error.problem) from error


def _template(model: ServedModel) -> RerankTemplate:
    template = model.rerank_template
    assert template is not None
    return template
