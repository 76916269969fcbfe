"""How requests become sequences: what forks, what a cached prefix may stand in for, what counts as waiting."""

import dataclasses

import pytest

from pyruntime.errors import ComputeFault, InvalidField
from pyruntime.jobs.batch import ClassifyJob, EmbedJob, ScoreJob
from pyruntime.jobs.generate import MOST_TAKEN, GenerateJob, Inbox
from pyruntime.scheduler.blocks import BlockPool
from pyruntime.scheduler.prefix_cache import PrefixCache
from pyruntime.scheduler.scheduler import Scheduler
from pyruntime.scheduler.sequence import State
from pyruntime.types import (
    ClassifyRequest,
    EmbeddingKind,
    EmbedRequest,
    FinishReason,
    PoolingType,
    SampledToken,
    SamplingParams,
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


class Chain:
    """A stream after its prompt, in a scheduler of its own, that is told what a step drew."""

    def __init__(self, **stop):
        self.pool = BlockPool(16, 4)
        self.cache = PrefixCache(self.pool)
        self.scheduler = Scheduler(self.pool, 64, 8, prefix_cache=self.cache)
        self.job = GenerateJob(generate([1, 2, 3], **stop))
        (self.sequence,) = self.job.sequences
        self.scheduler.add(self.job.sequences)
        self.scheduler.advance(self.scheduler.schedule())
        self.job.take(self.sequence, SampledToken(50), self.scheduler)
        self.scheduler.advance(self.scheduler.schedule())
        self.job._pending.clear()

    def take(self, *tokens):
        drawn = [token if token is None else SampledToken(token, logprob=-float(token)) for token in tokens]
        self.job.take(self.sequence, drawn[0]._replace(following=tuple(drawn[1:])), self.scheduler)
        return [(event.token_id, event.logprob, event.finish) for event in self.job._pending]


async def test_tokens_of_one_step_become_events_in_order_and_all_but_the_last_have_keys_already():
    chain = Chain(count=50)
    assert chain.take(60, 61, 62) == [(60, -60.0, None), (61, -61.0, None), (62, -62.0, None)]
    assert chain.sequence.token_ids == [1, 2, 3, 50, 60, 61, 62]
    assert (chain.sequence.num_computed, chain.sequence.is_decoding) == (6, True)
    assert chain.scheduler.load().num_accepted == 2


async def test_full_blocks_of_foreseen_tokens_are_known_to_the_prefix_cache_and_never_others():
    for last, expected in ((63, 1), (64, 2)):
        chain = Chain(count=50)
        chain.sequence.blocks += chain.pool.allocate(1)  # as for four drafts
        chain.take(*range(60, last + 1))
        assert len(chain.cache) == expected
        assert chain.cache.match([1, 2, 3, 50, 60, 61, 62, 63, 0], 8)[1] == chain.sequence.blocks[:expected]


@pytest.mark.parametrize(
    ("stop", "tokens", "finish"),
    [
        ({"count": 50, "stops": [61]}, [60, 61], FinishReason.STOP),
        ({"count": 3}, [60, 61], FinishReason.LENGTH),
        ({"count": 50, "stops": [60, 61], "least": 2}, [60, 61], FinishReason.STOP),
    ],
)
async def test_nothing_comes_behind_the_end_of_a_stream(stop, tokens, finish):
    chain = Chain(**stop)
    assert chain.take(60, 61, 62, None) == [(60, -60.0, None), (61, -61.0, finish)]
    assert chain.job.done
    assert chain.job._error is None
    assert (chain.sequence.state, chain.pool.num_used) == (State.FINISHED, 0)


async def test_a_foreseen_row_that_is_not_finite_fails_the_request_behind_the_tokens_before_it():
    chain = Chain(count=50)
    assert chain.take(60, 61, None) == [(60, -60.0, None), (61, -61.0, None)]
    assert isinstance(chain.job._error, ComputeFault)
    assert (chain.sequence.state, len(chain.cache)) == (State.FINISHED, 0)


async def test_what_is_taken_at_once_is_bounded():
    inbox = Inbox()
    inbox.put([TokenEvent(0, token) for token in range(MOST_TAKEN + 10)])
    inbox.end(None)
    sizes = []
    while events := inbox.take():
        sizes.append(len(events))
    assert sizes == [MOST_TAKEN, 10]


@pytest.mark.parametrize(("allows_others", "blames_the_cache"), [(True, True), (False, False)])
async def test_a_request_that_asks_the_impossible_is_no_reason_to_distrust_the_cache(allows_others, blames_the_cache):
    """Numbers that are not finite are: prompts of other clients may begin with what was computed."""

    class Matcher:
        def allows_any_but(self, token_ids):
            return allows_others

    class Memory:
        distrusted = dropped = 0

        def distrust(self, sequence):
            self.distrusted += 1

        def drop(self, sequence):
            self.dropped += 1

    job, memory = GenerateJob(generate([1, 2], 9, n=3, stops=[4], least=2)), Memory()
    job.sequences[1].matcher = Matcher()
    job.take(job.sequences[1], None, memory)
    job.inbox.end(job._error)
    error, says = (ComputeFault, "not finite") if blames_the_cache else (InvalidField, "2 cannot be reached")
    with pytest.raises(error, match=says):
        job.inbox.take()
    assert (memory.distrusted, memory.dropped) == (blames_the_cache, 3)


@pytest.mark.parametrize(("wanted", "reads"), [(None, 0), (0, 1), (1, 2), (20, 2)])
async def test_prompt_rows_that_a_head_reads_are_counted_until_they_are_read(wanted, reads):
    request = dataclasses.replace(generate([1, 2, 3], 5, n=2), prompt_logprobs=wanted)
    job = GenerateJob(request)
    first, second = job.sequences
    assert (first.row_reads, second.row_reads) == (reads, 0)
    scheduler = Scheduler(BlockPool(64, 4), 64, 8)
    scheduler.add(job.sequences)
    scheduler.advance(scheduler.schedule())
    job.take(first, SampledToken(7), scheduler)
    assert first.row_reads == 0


@pytest.mark.parametrize(("sampling", "waiting"), [({}, 600), ({"logprobs": 0}, 600), ({"logprobs": 20}, 54)])
async def test_streams_with_many_log_probabilities_fall_behind_sooner(sampling, waiting):
    """What a client leaves unread takes about the same memory whatever it asks for."""
    request = dataclasses.replace(generate([1], 999, n=2), sampling=SamplingParams(**sampling))
    job = GenerateJob(request, buffer_tokens=300)
    job._num_sent = waiting
    assert not job.is_behind
    job._num_sent += 1
    assert job.is_behind
