"""The classification head over rows of mixed, chunked and delimited sequences, against float64."""

import pytest
import torch

from pyruntime.heads.classifier import CrossEncodingPooler
from pyruntime.model.classifier import Classifier, Reads
from pyruntime.scheduler.sequence import Sequence
from pyruntime.types import ClassifyRequest, ForwardBatch, SequenceRows, Task

WIDTH, LABELS, DELIMITER, PADDING = 16, 3, 7, 5


@pytest.fixture(scope="module")
def weight():
    torch.manual_seed(4)
    return torch.randn(LABELS, WIDTH)


@pytest.fixture(scope="module")
def pooler_of(weight):
    def make(reads, activation="Softmax"):
        def head(rows):
            return torch.nn.functional.gelu(rows.float()) @ weight.T

        return CrossEncodingPooler(Classifier(head, reads, ("a", "b", "c"), activation, PADDING))

    return make


def exact(rows, weight):
    return torch.nn.functional.gelu(rows.double()) @ weight.double().T


def sequence_of(ids, **options):
    return Sequence(Task.CLASSIFY, list(ids), ClassifyRequest([list(ids)], **options))


def whole(sequences, task=Task.CLASSIFY):
    """Every sequence with all of its rows, one behind the other."""
    rows, start = [], 0
    for sequence in sequences:
        rows.append(SequenceRows(sequence, task, start, len(sequence), True))
        start += len(sequence)
    return ForwardBatch(rows, None, None, None), torch.randn(start, WIDTH)


def chunked(pooler, sequence, hidden, cuts):
    """The same rows in several steps."""
    for begin, end in zip([0, *cuts], [*cuts, len(sequence)], strict=True):
        sequence.num_computed = begin
        rows = SequenceRows(sequence, Task.CLASSIFY, 0, end - begin, end == len(sequence))
        if rows.reads:
            return pooler.classify(hidden[begin:end], ForwardBatch([rows], None, None, None)).scores[0]
        pooler.keep_partial(hidden[begin:end], rows)
        pooler.keep_partial(hidden[begin:end], rows)  # a step that failed and ran again
    raise AssertionError


def close(own, expected):
    torch.testing.assert_close(torch.from_numpy(own).double(), expected, atol=1e-5, rtol=1e-5)


def expected_logits(reads, own, weight):
    if reads is Reads.FIRST:
        return exact(own[:1], weight)[0]
    if reads is Reads.LAST:
        return exact(own[-1:], weight)[0]
    if reads is Reads.MEAN:
        return exact(own.double().mean(0, keepdim=True), weight)[0]
    logits = exact(own, weight)
    return logits if reads is Reads.EACH else logits.mean(0)


@pytest.mark.parametrize("reads", Reads)
def test_each_sequence_of_a_batch_is_read_at_its_own_rows(pooler_of, weight, reads):
    torch.manual_seed(1)
    sequences = [sequence_of(range(10, 10 + n), raw=n % 2 == 0) for n in (1, 4, 7, 2)]
    batch, hidden = whole(sequences)
    results = pooler_of(reads).classify(hidden, batch).scores
    for rows, result in zip(batch.rows, results, strict=True):
        expected = expected_logits(reads, hidden[rows.start : rows.start + rows.length], weight)
        close(result, expected if rows.length % 2 == 0 else torch.softmax(expected, -1))


@pytest.mark.parametrize("reads", [Reads.FIRST, Reads.LAST, Reads.EACH, Reads.MEAN_OF_EACH])
@pytest.mark.parametrize("cuts", [[1], [5, 6, 11], [12]])
def test_a_chunked_prompt_reads_as_a_whole_one(pooler_of, weight, reads, cuts):
    torch.manual_seed(2)
    hidden = torch.randn(13, WIDTH)
    result = chunked(pooler_of(reads), sequence_of(range(20, 33), raw=True), hidden, cuts)
    close(result, expected_logits(reads, hidden, weight))


@pytest.mark.parametrize("cuts", [[], [3], [2, 4, 5], [9]])
def test_delimited_items_are_read_before_each_delimiter_after_the_first(pooler_of, weight, cuts):
    torch.manual_seed(3)
    ids = [1, 2, DELIMITER, 3, DELIMITER, DELIMITER, 4, 5, 6, DELIMITER, 8]
    hidden = torch.randn(len(ids), WIDTH)
    sequence = sequence_of(ids, raw=True, delimiter_token_id=DELIMITER)
    close(chunked(pooler_of(Reads.LAST), sequence, hidden, cuts), exact(hidden[[3, 4, 8]], weight))


def test_without_a_second_delimiter_there_are_no_items(pooler_of):
    sequences = [sequence_of([1, DELIMITER, 2], delimiter_token_id=DELIMITER), sequence_of([1, 2])]
    batch, hidden = whole(sequences)
    none, one = pooler_of(Reads.LAST).classify(hidden, batch).scores
    assert (none.shape, one.shape) == ((0, LABELS), (LABELS,))


@pytest.mark.parametrize(("ids", "position"), [([1, 2, PADDING, PADDING], 1), ([PADDING] * 3, 0), ([PADDING, 3], 1)])
def test_the_last_token_is_the_last_that_is_not_padding(pooler_of, weight, ids, position):
    batch, hidden = whole([sequence_of(ids, raw=True)])
    close(pooler_of(Reads.LAST).classify(hidden, batch).scores[0], exact(hidden[position : position + 1], weight)[0])


def test_a_row_that_was_not_computed_fails_its_sequence_alone(pooler_of):
    """A prefix that came from the cache has no hidden rows."""
    cached, other = sequence_of([1, 2, 3, PADDING]), sequence_of([1, 2])
    rows = [SequenceRows(cached, Task.CLASSIFY, 0, 1, True), SequenceRows(other, Task.CLASSIFY, 1, 2, True)]
    scores = pooler_of(Reads.LAST).classify(torch.randn(3, WIDTH), ForwardBatch(rows, None, None, None)).scores
    assert [own is None for own in scores] == [True, False]


@pytest.mark.parametrize("reads", Reads)
def test_a_row_that_is_not_finite_fails_alone(pooler_of, reads):
    sequences = [sequence_of(range(10, 13), raw=raw) for raw in (True, False, True, False)]
    batch, hidden = whole(sequences)
    hidden[3:6] = torch.nan
    scores = pooler_of(reads).classify(hidden, batch).scores
    assert [own is None for own in scores] == [False, True, False, False]


def test_a_prefix_leaves_nothing_behind(pooler_of):
    prefix = Sequence(Task.CLASSIFY, [1, 2, 3], ClassifyRequest([[4]], prefix=[1, 2, 3]), is_prefix=True)
    pooler_of(Reads.FIRST).keep_partial(torch.randn(3, WIDTH), SequenceRows(prefix, Task.CLASSIFY, 0, 3, False))
    assert prefix.partial_hidden == []
