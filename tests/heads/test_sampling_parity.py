"""Requests as they come in, sampled from given logits, against transformers' logits processors in float64.

Both say from what a token is drawn. Ours is asked in two ways: each draw of the kernel must fall on the token whose
share of the reference's mass holds the draw's own random number, and the exact twin of the kernel, which draws the
same, must have the reference's allowed set and probabilities.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pyruntime.heads.sampler import Sampler
from pyruntime.model.output_head import OutputHead
from pyruntime.ops import reference
from pyruntime.scheduler.sequence import Sequence
from pyruntime.service.generate import read_stop
from pyruntime.service.validate import read_sampling
from pyruntime.types import Capability, ForwardBatch, GenerateRequest, SequenceRows, Task
from pyruntime.v1 import generate_pb2
from tests.fakes import EOS, VOCAB, fake_model
from tests.ops import exact_sampler

DRAWS = 128
CLOSE = 1e-5
# The kernel never draws tokens less probable than this times the most probable one.
LEAST_SHARE = 2.0**-44


class Counted(LogitsProcessor):
    """The penalties that transformers lacks, as OpenAI's reference states them: of the generated tokens alone."""

    def __init__(self, prompt_length: int, frequency: float, presence: float) -> None:
        self._prompt_length, self._frequency, self._presence = prompt_length, frequency, presence

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(input_ids[0, self._prompt_length :], minlength=scores.shape[1])
        return scores - counts * self._frequency - (counts > 0) * self._presence


class Mask:
    """A constraint that lets some tokens through."""

    def __init__(self, allowed: np.ndarray) -> None:
        bits = np.zeros(-(-VOCAB // 32) * 32, dtype=np.uint8)
        bits[:VOCAB] = allowed
        self.mask = np.packbits(bits, bitorder="little").view(np.int32)


def expected(request, prompt, generated, logits, allowed) -> np.ndarray:
    """float64 [V]: the documented order, each step by transformers."""
    sampling, stop = request.sampling, request.stop
    given = {field.name for field, _ in sampling.ListFields()}
    steps = LogitsProcessorList([Counted(len(prompt), sampling.frequency_penalty, sampling.presence_penalty)])
    if "repetition_penalty" in given:
        steps.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.logit_bias:
        steps.append(SequenceBiasLogitsProcessor([[[token], bias] for token, bias in sampling.logit_bias.items()]))
    if stop.HasField("min_new_tokens"):
        ending = [*stop.token_ids, *([] if stop.ignore_eos else [EOS])]
        if ending:
            steps.append(MinNewTokensLengthLogitsProcessor(len(prompt), stop.min_new_tokens, ending))
    if allowed is not None:
        steps.append(SuppressTokensLogitsProcessor(np.flatnonzero(~allowed).tolist()))
    greedy = "temperature" in given and sampling.temperature == 0
    if "temperature" in given and not greedy:
        steps.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k > 0:
        steps.append(TopKLogitsWarper(sampling.top_k))
    if "top_p" in given and sampling.top_p < 1:
        steps.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0:
        steps.append(MinPLogitsWarper(sampling.min_p))
    scores = steps(torch.tensor([[*prompt, *generated]]), logits.double()[None])[0]
    if greedy:
        return torch.nn.functional.one_hot(scores.argmax(), VOCAB).double().numpy()
    return torch.softmax(scores, dim=0).numpy()


def twin(sequence, logits, allowed) -> np.ndarray:
    """float64 [V]: what the kernel draws from, from its own integers."""
    settings, stop = sequence.payload.sampling, sequence.payload.stop
    prompt, generated = sequence.token_ids[: sequence.num_prompt], sequence.token_ids[sequence.num_prompt :]
    bias = dict(settings.logit_bias)
    if len(generated) < stop.min_new_tokens:
        bias |= dict.fromkeys(stop.token_ids, -np.inf)
    adjusted = reference.adjusted_logits(
        logits,
        seen={token: generated.count(token) for token in [*prompt, *generated]},
        repetition=settings.repetition_penalty,
        frequency=settings.frequency_penalty,
        presence=settings.presence_penalty,
        bias=bias,
        allowed=None if allowed is None else torch.from_numpy(allowed),
    )
    filters = (settings.temperature, settings.top_k, settings.top_p, settings.min_p)
    weights = exact_sampler.weights(adjusted.numpy(), *filters)
    shares = np.zeros(VOCAB)
    shares[list(weights)] = list(weights.values())
    return shares / shares.sum()


@pytest.fixture(scope="module")
def model():
    return fake_model("m", {Capability.GENERATE})


@pytest.fixture(scope="module")
def sampler():
    return Sampler(OutputHead(torch.eye(VOCAB), None))  # the hidden rows are the logits


def check(model, sampler, request, seed, is_constrained=False) -> None:
    generator = np.random.default_rng(seed)
    prompt = generator.integers(0, VOCAB, 20).tolist()
    generated = generator.choice([*prompt, 3, 4, 5, 5, EOS], int(generator.integers(0, 25))).tolist()
    logits = torch.from_numpy((generator.standard_normal(VOCAB) * 4).astype(np.float32))
    params = read_sampling(request, model.generation_defaults, VOCAB)
    stop = read_stop(request.stop, model, len(prompt), frozenset(request.stop.token_ids))
    job = GenerateRequest(prompt, params, stop, DRAWS)
    sequences = [Sequence(Task.GENERATE, [*prompt], job, index) for index in range(DRAWS)]
    for sequence in sequences:
        sequence.token_ids += generated
    allowed = generator.random(VOCAB) < 0.3 if is_constrained else None
    if allowed is not None:
        allowed[min(set(range(40)) - stop.token_ids)] = True
        for sequence in sequences:
            sequence.matcher = Mask(allowed)
    want, own = expected(request, prompt, generated, logits, allowed), twin(sequences[0], logits, allowed)
    assert ((own > 0) == (want > LEAST_SHARE * want.max())).all()
    np.testing.assert_allclose(own, want, atol=CLOSE, rtol=0)
    rows = [SequenceRows(each, Task.GENERATE, place, 1, True) for place, each in enumerate(sequences)]
    drawn = sampler.sample(logits.expand(DRAWS, -1), ForwardBatch(rows, None, None, None)).tokens
    above = np.cumsum(want)
    for index, token in enumerate(drawn):
        chance = exact_sampler.philox(params.seed, len(prompt) + len(generated), index) / 2**64
        low = above[token.token_id] - want[token.token_id]
        assert want[token.token_id] > 0
        assert low - CLOSE <= chance <= above[token.token_id] + CLOSE


def request_of(stop=None, **sampling) -> generate_pb2.GenerateRequest:
    return generate_pb2.GenerateRequest(sampling={"seed": 9} | sampling, stop=stop)


ALONE = [
    *[{"temperature": value} for value in (0, 1e-3, 0.3, 1.0, 1.7, 100)],
    *[{"top_k": value} for value in (-1, 0, 1, 2, 40, VOCAB, 2**31 - 1)],
    *[{"top_p": value} for value in (1e-6, 0.1, 0.5, 0.95, 0.9999, 1.0)],
    *[{"min_p": value} for value in (0, 1e-6, 0.02, 0.5, 1.0)],
    *[{"repetition_penalty": value} for value in (0.01, 0.7, 1.0, 1.3, 2.0)],
    *[{"frequency_penalty": value} for value in (-2, -0.3, 0, 0.7, 2)],
    *[{"presence_penalty": value} for value in (-2, -0.3, 0, 0.7, 2)],
    *[{"logit_bias": value} for value in ({3: 5.0}, {3: -100.0, EOS: 100.0}, {i: i / 10 for i in range(VOCAB)})],
    *[{"seed": value} for value in (0, 1, 2**63, 2**64 - 1)],
    *[{"stop": {"min_new_tokens": value, "max_new_tokens": 40}} for value in (0, 1, 10, 40)],
    {"stop": {"min_new_tokens": 40, "token_ids": [3, 4, 5], "ignore_eos": True, "max_new_tokens": 40}},
]


@pytest.mark.parametrize("fields", ALONE, ids=lambda fields: str(fields)[:50])
def test_each_field_alone(model, sampler, fields):
    for seed in range(3):
        check(model, sampler, request_of(**fields), seed)
    check(model, sampler, request_of(**fields), 3, is_constrained=True)


def any_of(draw: random.Random) -> generate_pb2.GenerateRequest:
    """Each field is given with even odds, of its whole range."""
    tokens = lambda count: draw.sample(range(VOCAB), draw.randrange(1, count))  # noqa: E731
    choices = {
        "temperature": lambda: draw.choice([0.0, 0.05, draw.uniform(0.2, 3), draw.uniform(3, 100)]),
        "top_k": lambda: draw.choice([-1, 1, draw.randrange(2, 300)]),
        "top_p": lambda: draw.choice([draw.uniform(0.01, 1), draw.uniform(0.9, 1)]),
        "min_p": lambda: draw.choice([draw.uniform(0, 0.05), draw.random()]),
        "repetition_penalty": lambda: draw.uniform(0.05, 2),
        "frequency_penalty": lambda: draw.uniform(-2, 2),
        "presence_penalty": lambda: draw.uniform(-2, 2),
        "logit_bias": lambda: {token: draw.uniform(-20, 20) for token in tokens(60)},
    }
    sampling = {name: choose() for name, choose in choices.items() if draw.random() < 0.5}
    stop = {"max_new_tokens": 40, "token_ids": tokens(9), "ignore_eos": draw.random() < 0.5}
    if draw.random() < 0.5:
        stop["min_new_tokens"] = draw.randrange(41)
    return request_of(stop, seed=draw.getrandbits(64), **sampling)


@pytest.mark.parametrize("part", range(5))
def test_two_hundred_random_combinations(model, sampler, part):
    draw = random.Random(part)
    for place in range(40):
        check(model, sampler, any_of(draw), 100 * part + place, is_constrained=place % 4 == 0)
