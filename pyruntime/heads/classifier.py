"""Sequences to classify: the rows that a model's classification head reads → logits → its activation."""

from __future__ import annotations

from typing import Any

import torch

from pyruntime.model.classifier import Classifier, Reads
from pyruntime.ops import pooling
from pyruntime.types import ClassificationBatchResult, ForwardBatch, SequenceRows, Task


class CrossEncodingPooler:
    """Runs the classification head once over all classified sequences of a batch: texts and pairs alike.

    A prompt that was cut into chunks leaves behind the logits of what its head read in them, not hidden rows.
    Only causal prompts are cut, and none of their heads reads the mean of hidden rows.
    """

    def __init__(self, classifier: Classifier) -> None:
        self._classifier = classifier

    def keep_partial(self, hidden: torch.Tensor, rows: SequenceRows) -> None:
        """Read what a chunk that is not the sequence's last holds for the head."""
        if rows.sequence.is_prefix:  # computed for its children, who read their own rows
            return
        sequence, first = rows.sequence, rows.sequence.num_computed
        read = score_and_pool(self._classifier, hidden, [(rows, first)])[0]
        # A step that failed may run again: what it had left behind is replaced, not doubled.
        before = [each for each in sequence.partial_hidden if each[0] < first]
        sequence.partial_hidden = [*before, (first, read)]

    def classify(self, hidden: torch.Tensor, batch: ForwardBatch) -> ClassificationBatchResult:
        """What ``ClassifyResult.scores`` says for each reading CLASSIFY row of the batch, in row order."""
        reading = [rows for rows in batch.rows if rows.task is Task.CLASSIFY and rows.reads]
        if not reading:
            return ClassificationBatchResult([])
        places = [(rows, len(rows.sequence) - rows.length) for rows in reading]
        read = score_and_pool(self._classifier, hidden, places)
        return ClassificationBatchResult([self._scores(*each) for each in zip(reading, read, strict=True)])

    def _scores(self, rows: SequenceRows, logits: torch.Tensor) -> object | None:
        """``logits``: of the last chunk. None where one is not finite, or where the head's row was not computed."""
        sequence, classifier = rows.sequence, self._classifier
        logits = torch.cat([*(read for _, read in sequence.partial_hidden), logits])
        delimited = sequence.payload.delimiter_token_id is not None
        if classifier.reads is not Reads.MEAN and len(logits) != len(_positions(classifier, sequence)):
            return None
        if not delimited:
            logits = classifier.conclude(logits)
        if not bool(torch.isfinite(logits).all()):
            return None
        values = logits if sequence.payload.raw else classifier.activate(logits)
        return values.numpy() if delimited or classifier.classifies_tokens else values[0].numpy()


def score_and_pool(
    classifier: Classifier, hidden: torch.Tensor, places: list[tuple[SequenceRows, int]]
) -> list[torch.Tensor]:
    """Logits float32 [rows, labels], on the CPU, of what the head reads of each sequence in this step.

    hidden [T, H]; ``places``: a sequence's rows, and which of its tokens is the first of them. With the request's
    ``delimiter_token_id`` d, a sequence q d i₁ d … iₙ d is read at the row before each d after the first, [n, labels];
    else where the classifier reads.
    """
    picked = [_picked(classifier, hidden, *place) for place in places]
    logits = classifier.logits(torch.cat(picked)).cpu()
    return list(logits.split([len(rows) for rows in picked]))


def _picked(classifier: Classifier, hidden: torch.Tensor, rows: SequenceRows, first: int) -> torch.Tensor:
    positions = _positions(classifier, rows.sequence)
    if isinstance(positions, torch.Tensor):
        inside = positions[(positions >= first) & (positions < first + rows.length)] - first + rows.start
        return hidden[inside.to(hidden.device)]
    begin, end = max(positions.start, first), min(positions.stop, first + rows.length)
    own = hidden[rows.start + begin - first : rows.start + max(begin, end) - first]
    return classifier.pool(own)


def _positions(classifier: Classifier, sequence: Any) -> range | torch.Tensor:
    """Tokens of the whole sequence that the head reads: a chunk may end right before a delimiter."""
    delimiter = sequence.payload.delimiter_token_id
    if delimiter is None:
        return classifier.positions(sequence.token_ids)
    starts = torch.tensor([0, len(sequence)], dtype=torch.int32)
    return pooling.delimiter_rows(torch.tensor(sequence.token_ids), starts, delimiter)[0]
