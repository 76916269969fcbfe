"""Rows behind drafts are sampled as the steps would be that drew these drafts, and count as far as they foresaw."""

import random

import pytest
import torch

from pyruntime.heads.sampler import Sampler
from pyruntime.model.output_head import OutputHead
from pyruntime.scheduler.sequence import Sequence
from pyruntime.types import GenerateRequest, SamplingParams, StopParams, Task
from tests.heads.batches import batch_of

VOCABULARY, WIDTH = 40, 8
SETTINGS = [
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 1.2, "top_k": 7, "repetition_penalty": 1.4},
    {"temperature": 0.7, "frequency_penalty": 0.9, "presence_penalty": -0.4},
    {"temperature": 0.0, "repetition_penalty": 1.8, "frequency_penalty": 1.5},
    {"temperature": 1.0, "logit_bias": ((3, 2.0), (30, -100.0))},
    {"temperature": 0.6, "logprobs": 4, "logprob_ids": (1, 30)},
    {"temperature": 0.0, "logprobs": 0, "presence_penalty": 1.0},
]


@pytest.fixture
def sampler():
    torch.manual_seed(1)
    return Sampler(OutputHead(torch.randn(VOCABULARY, WIDTH), None, row_invariant=True))


def sequence(prompt, generated, place, **sampling):
    stop = StopParams(100, min_new_tokens=5, token_ids=frozenset({2, 3, 5, 7}))
    request = GenerateRequest(list(prompt), SamplingParams(**({"seed": place} | sampling)), stop)
    made = Sequence(Task.GENERATE, list(prompt), request, index=place % 3)
    made.token_ids += generated
    return made


def chain(token):
    return [token] if token is None else [token._replace(following=()), *token.following]


def one_by_one(sampler, hidden, each, drafts):
    """Step after step, as long as the drafts are what comes."""
    drawn, tokens = [], list(each.token_ids)
    for row, draft in zip(hidden, [*drafts, None], strict=True):
        (token,) = sampler.sample(row[None], batch_of([each], [[]])).tokens
        drawn.append(token)
        if token is None or token.token_id != draft:
            break
        each.token_ids.append(draft)
    each.token_ids = tokens
    return drawn


@pytest.mark.parametrize("seed", range(20))
def test_every_row_is_what_its_own_step_would_give(sampler, seed):
    draw = random.Random(seed)
    torch.manual_seed(seed)
    sequences, drafts, hidden = [], [], []
    for place in range(12):
        prompt = [draw.randrange(VOCABULARY) for _ in range(draw.randrange(1, 9))]
        generated = [draw.randrange(VOCABULARY) for _ in range(draw.randrange(6))]
        sequences.append(sequence(prompt, generated, place, **draw.choice(SETTINGS)))
        hidden.append(torch.randn(1 + draw.randrange(6), WIDTH) * 2)
        drafts.append([])
    for place, each in enumerate(sequences):  # right ones, up to a place where one may be wrong
        tokens = list(each.token_ids)
        for row in hidden[place][:-1]:
            (token,) = sampler.sample(row[None], batch_of([each], [[]])).tokens
            right = draw.random() < 0.8
            drafts[place].append(token.token_id if right else draw.randrange(VOCABULARY))
            each.token_ids.append(drafts[place][-1])
        each.token_ids = tokens
    together = [chain(token) for token in sampler.sample(torch.cat(hidden), batch_of(sequences, drafts)).tokens]
    alone = [one_by_one(sampler, *each) for each in zip(hidden, sequences, drafts, strict=True)]
    assert together == alone
    assert max(map(len, together)) > 2


@pytest.mark.parametrize(("bad", "expected"), [(0, [None]), (1, [1, None]), (2, [1, 1, None]), (3, [1, 1, 1])])
def test_a_row_that_is_not_finite_counts_when_drafts_reach_it(sampler, bad, expected):
    """Rows 0 to 3; the draft before the last row is wrong, so that one never counts."""
    weight = torch.zeros(VOCABULARY, WIDTH)
    weight[1] = 1.0
    hidden = torch.ones(4, WIDTH)
    hidden[bad] = torch.nan
    each = sequence([9], [], 0, temperature=0.0)
    (token,) = Sampler(OutputHead(weight, None)).sample(hidden, batch_of([each], [[1, 1, 8]])).tokens
    assert [each and each.token_id for each in chain(token)] == expected


def test_streams_with_and_without_drafts_share_a_batch(sampler):
    hidden = torch.randn(6, WIDTH)
    sequences = [sequence([place], [], place, temperature=0.0) for place in range(3)]
    (best,) = sampler.sample(hidden[1:2], batch_of([sequences[1]], [[]])).tokens
    tokens = sampler.sample(hidden, batch_of(sequences, [[], [best.token_id, 39, 39], []])).tokens
    assert [len(chain(token)) for token in tokens] == [1, 2, 1]
    for token, row, each in zip(tokens, hidden[[0, 1, 5]], sequences, strict=True):
        assert token.token_id == sampler.sample(row[None], batch_of([each], [[]])).tokens[0].token_id
