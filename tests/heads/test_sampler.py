"""What the sampler makes of requests, against the formulas in float64."""

import numpy as np
import pytest
import torch

from pyruntime.heads.sampler import Sampler
from pyruntime.model.output_head import OutputHead
from pyruntime.scheduler.sequence import Sequence
from pyruntime.types import ForwardBatch, GenerateRequest, SamplingParams, SequenceRows, StopParams, Task

VOCABULARY = 50


@pytest.fixture
def sampler():
    torch.manual_seed(1)
    return Sampler(OutputHead(torch.randn(VOCABULARY, 8), None))


def sequence(prompt, generated=(), index=0, stops=(), least=0, **sampling):
    stop = StopParams(100, least, frozenset(stops))
    made = Sequence(Task.GENERATE, list(prompt), GenerateRequest(list(prompt), SamplingParams(**sampling), stop), index)
    made.token_ids += generated
    return made


def draw(sampler, hidden, sequences):
    rows = [SequenceRows(each, Task.GENERATE, place, 1, True) for place, each in enumerate(sequences)]
    return sampler.sample(hidden, ForwardBatch(rows, None, None, None)).tokens


def expected_logits(sampler, row, sequence):
    """The order of the filters that the documentation promises, one step a line."""
    logits = (sampler._head.weight.double() @ row.double()).numpy().copy()
    settings, prompt, generated = sequence.payload.sampling, sequence.token_ids[: sequence.num_prompt], None
    generated = sequence.token_ids[sequence.num_prompt :]
    for token in set(generated):
        logits[token] -= settings.frequency_penalty * generated.count(token) + settings.presence_penalty
    for token in {*prompt, *generated}:
        factor = settings.repetition_penalty
        logits[token] = logits[token] * factor if logits[token] < 0 else logits[token] / factor
    for token, bias in settings.logit_bias:
        logits[token] += bias
    if len(generated) < sequence.payload.stop.min_new_tokens:
        logits[list(sequence.payload.stop.token_ids)] = -np.inf
    return logits


def test_penalties_biases_and_forbidden_stops_in_one_batch(sampler):
    hidden = torch.randn(6, 8) * 2
    greedy = {"temperature": 0.0}
    sequences = [
        sequence([1, 2, 3], [4, 4, 5], **greedy),
        sequence(range(40), [7, 7, 7, 9], repetition_penalty=1.9, **greedy),
        sequence(range(10), list(range(20, 45)) * 2, frequency_penalty=1.5, presence_penalty=-0.5, **greedy),
        sequence([5], [], logit_bias=((3, 9.0), (1, -4.0)), **greedy),
        sequence([5], [6], stops=range(30), least=2, **greedy),
        sequence([5], [6, 7], stops=range(30), least=2, **greedy),
    ]
    tokens = [token.token_id for token in draw(sampler, hidden, sequences)]
    assert tokens == [int(expected_logits(sampler, row, s).argmax()) for row, s in zip(hidden, sequences, strict=True)]
    plain = [sequence(each.token_ids, **greedy) for each in sequences]
    assert tokens != [token.token_id for token in draw(sampler, hidden, plain)]


def test_logprobs_are_of_the_raw_distribution_and_each_row_gets_its_own_number(sampler):
    hidden = torch.randn(4, 8)
    biased = {"logit_bias": ((11, 100.0),), "temperature": 0.3}
    sequences = [
        sequence([1], logprobs=0, **biased),
        sequence([1], logprobs=3, **biased),
        sequence([1], **biased),
        sequence([1], logprobs=5, temperature=0.0),
    ]
    tokens = draw(sampler, hidden, sequences)
    raw = torch.log_softmax(hidden.double() @ sampler._head.weight.double().T, dim=-1)
    assert [token.token_id for token in tokens[:3]] == [11, 11, 11]
    assert tokens[2].logprob is None
    assert [len(token.top) for token in tokens] == [0, 3, 0, 5]
    for place in (0, 1, 3):
        assert tokens[place].logprob == pytest.approx(float(raw[place, tokens[place].token_id]), abs=1e-5)
        for (token_id, logprob), reference in zip(tokens[place].top, raw[place].topk(5).indices, strict=False):
            assert token_id == reference
            assert logprob == pytest.approx(float(raw[place, reference]), abs=1e-5)


def test_a_row_that_is_not_finite_fails_alone(sampler):
    hidden = torch.randn(3, 8)
    hidden[1] = torch.nan
    for logprobs in (None, 2):
        tokens = draw(sampler, hidden, [sequence([1], logprobs=logprobs) for _ in range(3)])
        assert [token is None for token in tokens] == [False, True, False]


def test_continuations_of_one_seed_draw_apart_and_seeds_fill_64_bits(sampler):
    hidden = torch.randn(1, 8).expand(64, 8)
    top = 2**64 - 1
    draws = [token.token_id for token in draw(sampler, hidden, [sequence([1], index=i, seed=top) for i in range(64)])]
    assert len(set(draws)) > 5
    alone = draw(sampler, hidden[:1], [sequence([1], index=9, seed=top)])
    assert alone[0].token_id == draws[9]
