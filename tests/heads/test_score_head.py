"""Label probabilities of mixed requests in one batch, against float64."""

import pytest
import torch

from pyruntime.heads.score_head import ScoreHead
from pyruntime.model.output_head import OutputHead
from pyruntime.scheduler.sequence import Sequence
from pyruntime.types import ForwardBatch, ScoreRequest, SequenceRows, Task


def rows_of(requests):
    sequences = [Sequence(Task.SCORE, [1, 2], request) for request in requests]
    return [SequenceRows(each, Task.SCORE, 2 * place, 2, True) for place, each in enumerate(sequences)]


@pytest.mark.parametrize(("softcap", "scale"), [(0.0, 1.0), (5.0, 0.5)])
def test_all_forms_in_one_batch(softcap, scale):
    torch.manual_seed(2)
    head = OutputHead(torch.randn(77, 16), torch.randn(77), scale, softcap)
    requests = [
        ScoreRequest([], [[1, 2]], [3, 70], True, 0.7),
        ScoreRequest([], [[1, 2]], [5], False),
        ScoreRequest([], [[1, 2]], [9, 8, 7], True),
        ScoreRequest([], [[1, 2]], [0, 76, 3], False),
        ScoreRequest([], [[1, 2]], [11, 2], True, 3.0, raw=True),
    ]
    hidden = torch.randn(10, 16)
    scores = ScoreHead(head).score(hidden, ForwardBatch(rows_of(requests), None, None, None)).scores
    for place, (request, own) in enumerate(zip(requests, scores, strict=True)):
        logits = (hidden[2 * place + 1].double() @ head.weight.double().T + head.bias.double()) * scale
        logits = torch.tanh(logits / softcap) * softcap if softcap else logits
        if request.raw:
            expected = logits[request.label_ids]
        elif request.apply_softmax:
            expected = torch.softmax(logits[request.label_ids] / request.temperature, dim=-1)
        else:
            expected = torch.softmax(logits, dim=-1)[request.label_ids]
        torch.testing.assert_close(torch.tensor(own).double(), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-20])
def test_a_tiny_temperature_is_one_hot(temperature):
    torch.manual_seed(3)
    head = OutputHead(torch.randn(20, 8), None)
    request = ScoreRequest([], [[1, 2]], [4, 5, 6], True, temperature)
    (own,) = ScoreHead(head).score(torch.randn(2, 8), ForwardBatch(rows_of([request]), None, None, None)).scores
    assert sorted(own) == [0.0, 0.0, 1.0]


def test_a_row_that_is_not_finite_fails_alone():
    head = OutputHead(torch.randn(20, 8), None)
    for over_labels in (True, False):
        requests = [ScoreRequest([], [[1, 2]], [4, 5], over_labels)] * 3
        hidden = torch.randn(6, 8)
        hidden[3] = torch.inf
        scores = ScoreHead(head).score(hidden, ForwardBatch(rows_of(requests), None, None, None)).scores
        assert [own is None for own in scores] == [False, True, False]
