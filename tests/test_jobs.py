"""How requests become sequences: what forks, what a cached prefix may stand in for, what counts as waiting."""

import pytest

from pyruntime.jobs.batch import ClassifyJob, EmbedJob, ScoreJob
from pyruntime.jobs.generate import MOST_TAKEN, GenerateJob, Inbox
from pyruntime.types import (
    ClassifyRequest,
    EmbeddingKind,
    EmbedRequest,
    PoolingType,
    ScoreRequest,
    TokenEvent,
)
from tests.fake_compute import generate


@pytest.mark.parametrize(
    ("changes", "reuses"),
    [
        ({}, True),
        ({"pooling": PoolingType.MEAN}, False),
        ({"pooling": PoolingType.CLS}, False),
        ({"kind": EmbeddingKind.SPARSE}, False),
        ({"kind": EmbeddingKind.PER_TOKEN}, False),
        ({"skip_rows": [1, 0]}, False),
    ],
)
async def test_an_embedding_reuses_a_prefix_only_when_its_last_row_is_enough(changes, reuses):
    request = EmbedRequest(
        **{"inputs": [[1, 2], [3]], "pooling": PoolingType.LAST, "normalize": False} | changes, dimensions=4
    )
    job = EmbedJob(request)
    assert [sequence.reuses_prefix for sequence in job.sequences] == [reuses] * 2
    assert (job.num_unread, job.num_unread_certain) == (3, 0 if reuses else 3)


@pytest.mark.parametrize(
    ("delimiter", "reads_all_rows", "shares_prefix", "shared"),
    [(None, False, True, True), (None, False, False, False), (5, False, True, False), (None, True, True, False)],
)
async def test_a_classifier_shares_a_prefix_only_when_rows_of_its_own_are_enough(
    delimiter, reads_all_rows, shares_prefix, shared
):
    request = ClassifyRequest([[1, 2], [3]], prefix=[7] * 10, delimiter_token_id=delimiter)
    job = ClassifyJob(request, reads_all_rows=reads_all_rows, shares_prefix=shares_prefix)
    inputs = [sequence for sequence in job.sequences if not sequence.is_prefix]
    assert len(job.sequences) - len(inputs) == shared
    assert [list(sequence.token_ids) for sequence in inputs] == [[7] * 10 + [1, 2], [7] * 10 + [3]]
    assert all((sequence.parent is job.sequences[0]) == shared for sequence in inputs)
    assert [sequence.reuses_prefix for sequence in inputs] == [delimiter is None and not reads_all_rows] * 2
    assert job.num_unread == (12 + 1 if shared else 12 + 11)


async def test_an_input_that_ends_in_padding_is_computed_whole():
    """Its head reads a row before the padding, which may lie in what a cache gives no hidden rows of."""
    request = ClassifyRequest([[1, 2], [3, 0]], prefix=[7] * 10)
    job = ClassifyJob(request, reads_all_rows=False, shares_prefix=True, ignored_tail_id=0)
    assert [sequence.reuses_prefix for sequence in job.sequences[1:]] == [True, False]
    assert [sequence.parent for sequence in job.sequences[1:]] == [job.sequences[0], None]


async def test_a_shared_prompt_waits_once():
    assert ScoreJob(ScoreRequest([1] * 10, [[2], [3, 4]], [0], True)).num_unread == 11 + 2
    assert ScoreJob(ScoreRequest([1] * 10, [[2]], [0], True)).num_unread == 11
    assert GenerateJob(generate([1] * 10, 5, n=3)).num_unread == 10 + 2


async def test_continuations_share_one_copy_of_their_prompt():
    """128 of them behind a long prompt would else take the host a hundred times its memory."""
    request = generate([1] * 10, 5, n=3)
    _, *others = GenerateJob(request).sequences
    assert all(each.token_ids.prefix is request.prompt for each in others)


async def test_waiting_tokens_leave_as_they_are_computed_and_only_once():
    job = EmbedJob(EmbedRequest([[1] * 10], PoolingType.LAST, False, 4))
    (sequence,) = job.sequences
    left = []
    for computed in (4, 0, 4, 8, 10):  # set back in between, and computed again
        sequence.num_computed = computed
        left.append(job.note_computed(sequence))
    assert left == [4, 0, 0, 4, 2]
    assert job.num_unread == 0


async def test_a_shared_prefix_waits_no_more_as_far_as_it_is_computed():
    """A long one takes many steps: counted at their end, the work ahead of others would look undone until then."""
    job = ScoreJob(ScoreRequest([1] * 10, [[2], [3, 4]], [0], True))
    prefix, first, second = job.sequences
    for sequence, computed, left in ((prefix, 4, 4), (prefix, 10, 6), (first, 11, 1), (second, 12, 2)):
        sequence.num_computed = computed
        assert job.note_computed(sequence) == left
    assert job.num_unread == 0


async def test_what_is_taken_at_once_is_bounded():
    inbox = Inbox()
    inbox.put([TokenEvent(0, token) for token in range(MOST_TAKEN + 10)])
    inbox.end(None)
    sizes = []
    while events := await inbox.take():
        sizes.append(len(events))
    assert sizes == [MOST_TAKEN, 10]
