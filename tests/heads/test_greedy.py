"""Rows that want the largest logit alone get it by the screen, the same that all logits give."""

import dataclasses

import pytest
import torch

from pyruntime.heads import greedy
from pyruntime.heads.sampler import Sampler
from pyruntime.heads.sampling_rows import wants_largest
from pyruntime.model import output_head
from pyruntime.ops.linear import has_panels
from pyruntime.scheduler.sequence import Sequence
from pyruntime.types import GenerateRequest, SamplingParams, StopParams, Task
from tests.heads.batches import batch_of

VOCABULARY, WIDTH = 1600, 64
pytestmark = pytest.mark.skipif(not has_panels(torch.float32), reason="no products by panels on this processor")


class Model:
    def __init__(self, weight, bias=None):
        self.embeddings = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
        self.embeddings.weight = torch.nn.Parameter(weight, requires_grad=False)

    def get_output_embeddings(self):
        return self.embeddings


class Config:
    def __init__(self, **settings):
        self.__dict__.update(settings)


@pytest.fixture(autouse=True)
def screened_however_small(monkeypatch):
    monkeypatch.setattr(output_head, "LEAST_SCREENED", 0)
    monkeypatch.setattr(output_head, "has_screen", has_panels)
    torch.manual_seed(7)


@pytest.fixture(params=[torch.float32, torch.bfloat16])
def head(request):
    if not has_panels(request.param):
        pytest.skip("no products by panels of this dtype")
    weight = torch.randn(VOCABULARY, WIDTH).to(request.param)
    return output_head.output_head_of(Model(weight), Config(), row_invariant=False)


def sequence(place, generated=(), least=0, **sampling):
    stop = StopParams(100, least, frozenset({2, 3}))
    request = GenerateRequest([1, place], SamplingParams(**({"seed": place} | sampling)), stop)
    made = Sequence(Task.GENERATE, [1, place], request, index=0)
    made.token_ids += generated
    return made


def calls_of(monkeypatch):
    """What reaches the screen: the number of rows of each call."""
    seen = []
    largest = output_head.OutputHead.largest
    monkeypatch.setattr(output_head.OutputHead, "largest", lambda self, x: [seen.append(len(x)), largest(self, x)][1])
    return seen


def likely(head, rows):
    near = head.weight[torch.randint(0, VOCABULARY, (rows,))]
    return near + 0.3 * torch.randn(rows, WIDTH).to(near.dtype)


def test_what_takes_all_logits():
    assert wants_largest(sequence(0, temperature=0.0, top_k=3, top_p=0.5))
    assert wants_largest(sequence(0, [7], least=1, temperature=0.0))
    others = [{"temperature": 0.5}, {"logprobs": 0}, {"repetition_penalty": 1.1}, {"presence_penalty": 0.1}]
    others += [{"frequency_penalty": -0.1}, {"logit_bias": ((3, 2.0),)}, {"least": 1}]
    for each in others:
        assert not wants_largest(sequence(0, **({"temperature": 0.0} | each)))
    constrained = sequence(0, temperature=0.0)
    constrained.matcher = object()
    assert not wants_largest(constrained)


@pytest.mark.parametrize("greedy_rows", [3, 20])
def test_rows_of_all_kinds_share_a_batch(head, monkeypatch, greedy_rows):
    seen = calls_of(monkeypatch)
    sequences = [sequence(place, temperature=0.0) for place in range(greedy_rows)]
    sequences[1:1] = [sequence(90, temperature=1.0), sequence(91, temperature=0.0, logprobs=2)]
    hidden = likely(head, len(sequences))
    batch = batch_of(sequences, [[]] * len(sequences))
    plain = Sampler(dataclasses.replace(head, screen=None)).sample(hidden, batch).tokens
    assert not seen
    assert Sampler(head).sample(hidden, batch).tokens == plain
    assert seen == ([20] if greedy_rows == 20 else [])  # a few beside others that take all logits do not pay


def test_drafts_are_verified(head, monkeypatch):
    seen = calls_of(monkeypatch)
    hidden = likely(head, 6)
    best = head.logits(hidden).float().argmax(1).tolist()
    drafts = [[best[0], best[1], 9], []]
    sequences = [sequence(place, temperature=0.0) for place in range(2)]
    first, second = Sampler(head).sample(hidden[:5], batch_of(sequences, drafts)).tokens
    assert [first.token_id, *(each.token_id for each in first.following)] == best[:3]
    assert (second.token_id, second.following) == (best[4], ())
    assert seen == [5]


def test_rows_that_are_not_finite_fail_alone(head):
    hidden = likely(head, 4)
    hidden[1, 3], hidden[2, 0] = torch.nan, torch.inf
    sequences = [sequence(place, temperature=0.0) for place in range(4)]
    tokens = Sampler(head).sample(hidden, batch_of(sequences, [[]] * 4)).tokens
    assert [token is None for token in tokens] == [False, True, True, False]


def test_a_screen_that_decides_little_rests(head, monkeypatch):
    seen = calls_of(monkeypatch)
    sampler, each = Sampler(head), sequence(0, temperature=0.0)
    zero, row = torch.zeros(1, WIDTH, dtype=head.weight.dtype), likely(head, 1)
    assert sampler.sample(zero, batch_of([each], [[]])).tokens[0].token_id == 0  # all logits are equal
    want = head.logits(row)[0].float().argmax()
    for _ in range(greedy.PAUSE + 2):
        assert sampler.sample(row, batch_of([each], [[]])).tokens[0].token_id == want
    assert len(seen) == 3


def test_heads_that_are_not_screened(monkeypatch):
    weight = torch.randn(VOCABULARY, WIDTH)

    def made(model, **settings):
        return output_head.output_head_of(model, Config(**settings), row_invariant=False)

    assert made(Model(weight)).screen is not None
    for other in ({"logit_scale": 2.0}, {"logits_scaling": 3.0}, {"final_logit_softcapping": 30.0}):
        assert made(Model(weight), **other).screen is None
    assert made(Model(weight, bias=True)).screen is None
    assert made(Model(weight[:-3])).screen is None  # no whole panels
    assert output_head.output_head_of(Model(weight), Config(), row_invariant=False, is_int8=True).screen is None
    weight[5, 5] = torch.inf
    assert made(Model(weight)).screen is None
    monkeypatch.setattr(output_head, "LEAST_SCREENED", 2**24)
    assert made(Model(torch.randn(VOCABULARY, WIDTH))).screen is None
