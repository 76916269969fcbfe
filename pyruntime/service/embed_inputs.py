"""The inputs of an EmbedRequest as token ids, each different one once."""

from __future__ import annotations

from pyruntime.errors import InvalidField
from pyruntime.service.distinct import Distinct, distinct
from pyruntime.service.embed_plan import EmbedInput, EmbedPlan
from pyruntime.service.inputs import read_inputs
from pyruntime.service.queries import as_query
from pyruntime.service.room import ServiceRoom
from pyruntime.service.validate import text_bytes
from pyruntime.tokenization import Tokenizer
from pyruntime.v1 import common_pb2, embed_pb2


async def read_embed_inputs(
    room: ServiceRoom, request: embed_pb2.EmbedRequest, plan: EmbedPlan
) -> Distinct[EmbedInput]:
    """Tokenises, cuts, lengthens, and finds what is there twice."""
    sequences = await read_inputs(room.workers, plan.model, request.inputs, plan.reading(room))
    rows = 0
    if plan.skips_prompt:
        tokenizer, prompt = plan.model.tokenizer, plan.prompt.text
        rows = await room.workers.run(text_bytes(prompt), prompt_rows, tokenizer, prompt)
    inputs: list[EmbedInput | InvalidField] = []
    for place, (each, ids) in enumerate(zip(request.inputs, sequences, strict=True)):
        if isinstance(ids, InvalidField):
            inputs.append(ids)
        elif plan.skips_prompt:
            asked = rows if each.WhichOneof("value") == "text" else 0
            inputs.append(_without_prompt(plan, ids, asked, f"inputs[{place}]"))
        elif plan.are_queries:
            long, unseen = as_query(plan.model, ids)
            inputs.append(EmbedInput(long, unseen=unseen))
        else:
            inputs.append(EmbedInput(ids))
    num_ids = sum(len(each.ids) for each in inputs if isinstance(each, EmbedInput))
    if not num_ids:
        return Distinct([], [each for each in inputs if isinstance(each, InvalidField)])
    work: Distinct[EmbedInput] = await room.workers.run(num_ids, distinct, inputs, _key)
    return work


def prompt_rows(tokenizer: Tokenizer, prompt: str) -> int:
    """Rows that sentence-transformers leaves out for a prompt: its tokens alone, less a special one at their end."""
    ids = tokenizer.encode(prompt)
    return len(ids) - (bool(ids) and ids[-1] in tokenizer.special_token_ids)


def _key(each: EmbedInput) -> tuple[int, ...]:
    return (each.skip, each.unseen, *each.ids)


def _without_prompt(plan: EmbedPlan, ids: list[int], rows: int, field: str) -> EmbedInput | InvalidField:
    """``ids`` within the limit, and how many of the first ``rows`` are still there. One row at least must be left."""
    try:
        fitted = plan.token_limit.fit(plan.model, ids, field)
    except InvalidField as error:
        return error
    if plan.token_limit.truncation == common_pb2.TRUNCATION_LEFT:
        # The special tokens at the start stay; what was cut is the prompt's first.
        kept = min(rows, len(plan.model.tokenizer.leading_special_ids))
        rows = max(kept, rows - (len(ids) - len(fitted)))
    if rows and rows >= len(fitted):
        return InvalidField(field, f"has {len(fitted)} tokens, none of them behind its prompt's {rows}")
    return EmbedInput(fitted, rows)
