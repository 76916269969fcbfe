"""Batches for heads that read hidden rows alone."""

from pyruntime.types import ForwardBatch, SequenceRows, Task


def batch_of(sequences, drafts):
    """Of sequences that generate, each with one row and one for each of its drafts."""
    rows, start = [], 0
    for each, own in zip(sequences, drafts, strict=True):
        rows.append(SequenceRows(each, Task.GENERATE, start, 1 + len(own), True, own))
        start += 1 + len(own)
    return ForwardBatch(rows, None, None, None)
