"""Generating sequences: the last hidden row → logits → the next token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch

from pyruntime.heads import sampling_rows
from pyruntime.heads.greedy import Greedy
from pyruntime.model.linear import Buffer
from pyruntime.model.output_head import OutputHead
from pyruntime.ops import sampling
from pyruntime.placing import place
from pyruntime.types import ForwardBatch, GenerationBatchResult, SampledToken, Task


class Sampler:
    """Samples all generating rows of a batch in one kernel call, each with its own parameters; but for those that want
    the largest logit alone, which may be found without computing all of them.

    A draw is a function of (seed, position, n-index) and the logits alone, whatever shares its batch.
    """

    def __init__(self, head: OutputHead) -> None:
        self._head = head
        self._buffer = Buffer()
        self._greedy = Greedy(head)

    def sample(self, hidden: torch.Tensor, batch: ForwardBatch) -> GenerationBatchResult:
        """The next token of each reading GENERATE row of the batch, in row order, and those that drafts are right for.

        A row behind drafts is sampled as if these had been drawn: same history, same draw. It counts when they were.
        """
        reading = [rows for rows in batch.rows if rows.task is Task.GENERATE and rows.reads]
        if not reading:
            return GenerationBatchResult([])
        last = [rows.last + ahead for rows in reading for ahead in range(len(rows.drafts) + 1)]
        sequences = [each for rows in reading for each in sampling_rows.histories(rows.sequence, rows.drafts)]
        tokens = {row: SampledToken(token) for row, token in self._greedy.find(hidden, last, sequences).items()}
        left = [row for row in range(len(last)) if row not in tokens]
        if left:
            drawn = self._draw(hidden, [last[row] for row in left], [sequences[row] for row in left])
            tokens.update(zip(left, drawn, strict=True))
        each = (tokens[row] for row in range(len(last)))
        finite = (token if token.token_id >= 0 else None for token in each)
        return GenerationBatchResult([_verified(finite, rows.drafts) for rows in reading])

    def _draw(self, hidden: torch.Tensor, last: list[int], sequences: list[Any]) -> list[SampledToken]:
        """By all logits of the rows ``last``."""
        arguments = place({"last": np.array(last)} | sampling_rows.columns(sequences), hidden.device)
        placed, rows = arguments.pop("last"), sampling_rows.neighbours(hidden, last)
        logits = self._head.logits(hidden[placed] if rows is None else rows, self._buffer)
        wanted = [sequence.payload.sampling.logprobs for sequence in sequences]
        if any(count is not None for count in wanted):
            return _with_selected(logits, _with_logprobs(logits, arguments, wanted), sequences)
        return [SampledToken(token) for token in sampling.sample(logits, **arguments).tolist()]


def _verified(drawn: Iterator[SampledToken | None], drafts: Sequence[int]) -> SampledToken | None:
    """Takes a sequence's tokens off ``drawn``: the first, with those behind it up to one that no draft foresaw."""
    first, *others = islice(drawn, len(drafts) + 1)
    if first is None:
        return None
    own = [first.token_id, *(token.token_id if token is not None else None for token in others)]
    num_right = next((i for i, draft in enumerate(drafts) if own[i] != draft), len(drafts))
    return first._replace(following=tuple(others[:num_right])) if num_right else first


def _with_logprobs(
    logits: torch.Tensor, arguments: dict[str, torch.Tensor], wanted: list[int | None]
) -> list[SampledToken]:
    """The widest list that a row wants, cut to each row's own width; rows that want none get none."""
    most = min(max(count or 0 for count in wanted), logits.shape[1])
    answers = [column.tolist() for column in sampling.sample_with_logprobs(logits, top=most, **arguments)]
    tokens = []
    for token_id, logprob, top_ids, top_logprobs, count in zip(*answers, wanted, strict=True):
        if count is None:
            tokens.append(SampledToken(token_id))
        else:
            likeliest = tuple(zip(top_ids[:count], top_logprobs[:count], strict=True))
            tokens.append(SampledToken(token_id, logprob, likeliest))
    return tokens


def _with_selected(logits: torch.Tensor, tokens: list[SampledToken], sequences: list[Any]) -> list[SampledToken]:
    """Log-probabilities of each request's own list of tokens: the drawn one's plus the difference of the logits."""
    wanted = [sequence.payload.sampling.logprob_ids for sequence in sequences]
    answers = list(tokens)
    for row, (ids, token) in enumerate(zip(wanted, tokens, strict=True)):
        if ids and token.logprob is not None and token.token_id >= 0:
            own = logits[row, torch.tensor([token.token_id, *ids], device=logits.device)].float()
            answers[row] = token._replace(selected=tuple((own[1:] - own[0] + token.logprob).tolist()))
    return answers
