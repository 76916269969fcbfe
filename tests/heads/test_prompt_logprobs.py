"""Log-probabilities of prompts that come whole, in chunks and again, against log-softmax in float64."""

import numpy as np
import pytest
import torch

from pyruntime.heads import prompt_logprobs
from pyruntime.heads.prompt_logprobs import PromptHead
from pyruntime.model.output_head import OutputHead
from pyruntime.scheduler.sequence import Sequence
from pyruntime.types import ForwardBatch, GenerateRequest, SampledToken, SamplingParams, SequenceRows, StopParams, Task

VOCABULARY, WIDTH = 300, 8
PROMPT = [5, 299, 0, 7, 7, 12, 100, 3]


def sequence(wanted, prompt=PROMPT, index=0):
    request = GenerateRequest(list(prompt), SamplingParams(), StopParams(10), prompt_logprobs=wanted)
    return Sequence(Task.GENERATE, list(prompt), request, index)


def head_of(dtype=torch.float32, **options):
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator).to(dtype)
    return OutputHead(weight, torch.randn(VOCABULARY, generator=generator).to(dtype), **options)


def rows_of(dtype=torch.float32):
    return torch.randn(len(PROMPT), WIDTH, generator=torch.Generator().manual_seed(4)).to(dtype)


def expected(head, hidden):
    raw = hidden.double() @ head.weight.double().T + head.bias.double()
    raw = raw * head.scale
    raw = torch.tanh(raw / head.softcap) * head.softcap if head.softcap else raw
    return torch.log_softmax(raw, dim=1)[:-1].numpy()


def read(head, own, hidden, cuts, again=()):
    """The prompt through steps that end at ``cuts``; those of ``again`` run twice. A neighbour's row stands before."""
    prompt_head, start = PromptHead(head), 0
    for end in cuts:
        for _ in range(2 if end in again else 1):
            reads = end == len(own)
            rows = [
                SequenceRows(sequence(None), Task.GENERATE, 0, 1, True),
                SequenceRows(own, Task.GENERATE, 1, end - start, reads),
            ]
            packed = torch.cat([torch.full_like(hidden[:1], 9.0), hidden[start:end]])
            prompt_head.keep_partial(packed, ForwardBatch(rows, None, None, None))
        token = prompt_head.attach(SampledToken(1), rows[1]) if reads else None
        if end in again and reads:  # another head raised after this one had answered
            prompt_head.keep_partial(packed, ForwardBatch(rows, None, None, None))
            token = prompt_head.attach(SampledToken(1), rows[1])
        own.num_computed = start = end
    return token, prompt_head.attach(SampledToken(2), rows[0])


@pytest.mark.parametrize("cuts", [[8], [1, 8], [3, 5, 8], [7, 8], list(range(1, 9))])
@pytest.mark.parametrize("wanted", [0, 1, 5, 20])
def test_however_the_prompt_is_cut(cuts, wanted, monkeypatch):
    monkeypatch.setattr(prompt_logprobs, "MOST_LOGITS", 2 * VOCABULARY)  # several slices
    head, hidden = head_of(scale=0.5, softcap=6.0), rows_of()
    token, neighbour = read(head, sequence(wanted), hidden, cuts, again=cuts[::2])
    reference = expected(head, hidden)
    ids, logprobs = token.prompt
    assert ids.shape == logprobs.shape == (len(PROMPT) - 1, 1 + wanted)
    assert (ids.dtype, logprobs.dtype) == (np.int64, np.float32)
    assert ids[:, 0].tolist() == PROMPT[1:]
    np.testing.assert_allclose(logprobs, np.take_along_axis(reference, ids, 1), atol=1e-5)
    likeliest = np.argsort(-reference, axis=1, kind="stable")[:, :wanted]
    np.testing.assert_array_equal(ids[:, 1:], likeliest)
    assert neighbour.prompt is None


def test_half_precision_is_summed_in_float32():
    head, hidden = head_of(torch.bfloat16), rows_of(torch.bfloat16)
    ids, logprobs = read(head, sequence(4), hidden, [4, 8])[0].prompt
    np.testing.assert_allclose(logprobs, np.take_along_axis(expected(head, hidden), ids, 1), atol=1e-5)
    assert (np.diff(logprobs[:, 1:], axis=1) <= 0).all()


def test_more_alternatives_than_tokens_are_all_tokens():
    head = OutputHead(torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(5)), None)
    own = sequence(20, prompt=[0, 2, 1])
    ids, logprobs = read(head, own, rows_of()[:3], [3])[0].prompt
    assert np.sort(ids[:, 1:]).tolist() == [[0, 1, 2]] * 2
    np.testing.assert_allclose(np.exp(logprobs[:, 1:]).sum(1), 1, atol=1e-6)


def test_a_prompt_of_one_token_has_none():
    own = sequence(2, prompt=[4])
    ids, logprobs = read(head_of(), own, rows_of()[:1], [1])[0].prompt
    assert ids.shape == logprobs.shape == (0, 3)


def test_rows_that_are_no_numbers_fail_the_request():
    hidden = rows_of()
    hidden[2] = float("nan")
    assert read(head_of(), sequence(3), hidden, [8])[0] is None


def test_other_continuations_and_later_tokens_read_nothing():
    head, hidden = PromptHead(head_of()), rows_of()
    later = sequence(3)
    later.token_ids.append(9)
    for own in (sequence(3, index=1), later):
        rows = SequenceRows(own, Task.GENERATE, 0, len(PROMPT), True)
        head.keep_partial(hidden, ForwardBatch([rows], None, None, None))
        assert own.partial_hidden == []
        assert head.attach(SampledToken(1), rows) == SampledToken(1)
