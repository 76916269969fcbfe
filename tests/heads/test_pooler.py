"""All kinds of embedding in one packed batch with other tasks' rows, against float64, and what fails alone."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pyruntime.errors import ModelLoadError
from pyruntime.heads.pooler import Pooler
from pyruntime.model.late import LateSettings
from pyruntime.model.lexical import LexicalHeads
from pyruntime.model.sentence import SentenceSettings
from pyruntime.model.sentence_modules import Dense, Projection
from pyruntime.scheduler.sequence import Sequence
from pyruntime.types import EmbeddingKind, EmbedRequest, ForwardBatch, PoolingType, SequenceRows, Task

WIDTH, OUT = 24, 10
LENGTHS = [3, 1, 7, 4, 2, 5, 6, 3]


def loaded(dtype=torch.float32):
    return SimpleNamespace(
        hidden_size=WIDTH, device="cpu", dtype=dtype, architecture="SmallModel", model=None, layers={}
    )


def settings(projected, **options):
    generator = torch.Generator().manual_seed(1)
    weight, bias = torch.randn(OUT, WIDTH, generator=generator), torch.randn(OUT, generator=generator)
    steps = torch.nn.Sequential(Dense(weight, bias, torch.tanh))
    projection = Projection(steps, WIDTH, OUT, Path("2_Dense/config.json")) if projected else None
    lexical = LexicalHeads(Path("sparse_linear.pt"), torch.randn(WIDTH, generator=generator), 0.25, (0, 3), None)
    return SentenceSettings(PoolingType.MEAN, True, projection=projection, lexical=lexical, **options)


def batch_of(entries, input_ids=None):
    """entries: (request or None for another task, input's index, length) → the batch of their rows."""
    rows, start = [], 0
    for request, index, length in entries:
        task = Task.EMBED if request is not None else Task.GENERATE
        rows.append(SequenceRows(Sequence(task, [1] * length, request, index), task, start, length, True))
        start += length
    ids = torch.arange(start) % 9 if input_ids is None else input_ids
    return ForwardBatch(rows, ids, None, None)


def dense_expected(hidden, rows, request, sentence):
    own = hidden[rows.start : rows.start + rows.length].double()
    skipped = request.skip_rows[rows.sequence.index] if request.skip_rows else 0
    if skipped >= rows.length:
        vector = own[0] if request.pooling is PoolingType.CLS else torch.zeros(WIDTH, dtype=torch.float64)
    else:
        vector = {
            PoolingType.LAST: own[-1],
            PoolingType.CLS: own[skipped],
            PoolingType.MEAN: own[skipped:].mean(0),
        }[request.pooling]
    return finished(vector, request, sentence)


def finished(vectors, request, sentence):
    if sentence.projection is not None:
        dense = sentence.projection.steps[0]
        vectors = torch.tanh(vectors @ dense.weight.double().T + dense.bias.double())
    vectors = vectors[..., : request.dimensions]
    return torch.nn.functional.normalize(vectors, dim=-1, eps=1e-12) if request.normalize else vectors


def mixed(width):
    """Every kind, pooling and option, other tasks between, two of one request beside each other."""
    skips = EmbedRequest([], PoolingType.MEAN, True, width, skip_rows=[2, 0, 99, 1])
    return [
        (EmbedRequest([], PoolingType.MEAN, True, 5), 0, 3),
        (None, 0, 1),
        (skips, 0, 7),
        (skips, 2, 4),
        (EmbedRequest([], PoolingType.CLS, False, width, skip_rows=[1]), 0, 2),
        (EmbedRequest([], PoolingType.MEAN, True, width, kind=EmbeddingKind.PER_TOKEN), 0, 5),
        (None, 0, 6),
        (EmbedRequest([], PoolingType.MEAN, True, width, kind=EmbeddingKind.SPARSE), 0, 3),
        (EmbedRequest([], PoolingType.LAST, False, width), 0, 1),
        (EmbedRequest([], PoolingType.MEAN, False, 3, kind=EmbeddingKind.PER_TOKEN), 0, 2),
        (EmbedRequest([], PoolingType.CLS, True, width, skip_rows=[9]), 0, 2),
        (EmbedRequest([], PoolingType.MEAN, True, width, kind=EmbeddingKind.SPARSE), 0, 4),
    ]


def check(own, hidden, rows, sentence, ids):
    request = rows.sequence.payload
    span = slice(rows.start, rows.start + rows.length)
    if request.kind is EmbeddingKind.DENSE:
        expected = dense_expected(hidden, rows, request, sentence)
    elif request.kind is EmbeddingKind.PER_TOKEN:
        expected = finished(hidden[span].double(), request, sentence)
    else:
        weights = torch.relu(hidden[span].double() @ sentence.lexical.weight.double() + 0.25)
        best = {}
        for token, weight in zip(ids[span].tolist(), weights.tolist(), strict=True):
            if token not in (0, 3) and weight > 0:
                best[token] = max(weight, best.get(token, 0.0))
        assert own.ids.tolist() == sorted(best) and own.ids.dtype == np.int64
        np.testing.assert_allclose(own.weights, [best[i] for i in sorted(best)], atol=1e-5)
        return
    assert own.dtype == np.float32
    np.testing.assert_allclose(own, expected.numpy(), atol=1e-5)


@pytest.mark.parametrize("projected", [False, True])
def test_all_kinds_in_one_batch(projected):
    sentence = settings(projected)
    pooler = Pooler(loaded(), sentence)
    batch = batch_of(mixed(OUT if projected else WIDTH))
    hidden = torch.randn(len(batch.input_ids), WIDTH, generator=torch.Generator().manual_seed(4))
    reading = [rows for rows in batch.rows if rows.task is Task.EMBED]
    answers = pooler.pool(hidden, batch).embeddings
    for rows, own in zip(reading, answers, strict=True):
        check(own, hidden, rows, sentence, batch.input_ids)


@pytest.mark.parametrize("projected", [False, True])
def test_a_sequence_that_is_not_finite_fails_alone(projected):
    pooler = Pooler(loaded(), settings(projected))
    entries = mixed(OUT if projected else WIDTH)
    for place in range(len(entries)):
        batch = batch_of(entries)
        hidden = torch.randn(len(batch.input_ids), WIDTH, generator=torch.Generator().manual_seed(5))
        rows = batch.rows[place]
        hidden[rows.start : rows.start + rows.length] = torch.nan
        failed = [own is None for own in pooler.pool(hidden, batch).embeddings]
        skipped_all = (
            rows.sequence.payload is not None and rows.sequence.payload.skip_rows == [2, 0, 99, 1] and place == 3
        )
        expected = [each is rows and not skipped_all for each in batch.rows if each.task is Task.EMBED]
        assert failed == expected


def test_chunks_of_every_size_give_what_the_whole_gives():
    sentence = settings(projected=True)
    pooler = Pooler(loaded(), sentence)
    hidden = torch.randn(13, WIDTH, generator=torch.Generator().manual_seed(6))
    ids = torch.arange(13)
    requests = [
        EmbedRequest([], pooling, True, OUT, skip_rows=skips)
        for pooling in PoolingType
        for skips in (None, [1], [4], [12], [13])
    ]
    requests.append(EmbedRequest([], PoolingType.LAST, True, OUT, kind=EmbeddingKind.PER_TOKEN))
    for request in requests:
        (whole,) = pooler.pool(hidden, batch_of([(request, 0, 13)], ids)).embeddings
        for size in (1, 3, 4, 6, 12):
            sequence = Sequence(Task.EMBED, [1] * 13, request, 0)
            for start in range(0, 13, size):
                piece = hidden[start : start + size]
                rows = SequenceRows(sequence, Task.EMBED, 0, len(piece), start + size >= 13)
                batch = ForwardBatch([rows], ids[start : start + size], None, None)
                if not rows.reads:
                    pooler.keep_partial(piece, batch, rows)
            (pieced,) = pooler.pool(piece, batch).embeddings
            np.testing.assert_allclose(pieced, whole, atol=1e-6)
            assert sequence.partial_hidden == []


def test_tokens_that_documents_leave_out():
    late = LateSettings((2, 5), skips_in_queries=False, max_tokens=None, expansion=None, prefixed={})
    sentence = SentenceSettings(PoolingType.MEAN, True, late=late)
    ids = torch.tensor([1, 2, 4, 5, 5, 2, 2])
    hidden = torch.randn(7, WIDTH)
    document = EmbedRequest([], PoolingType.MEAN, True, WIDTH, kind=EmbeddingKind.PER_TOKEN)
    query = EmbedRequest([], PoolingType.MEAN, True, WIDTH, kind=EmbeddingKind.PER_TOKEN, as_query=True)
    entries = [(document, 0, 4), (query, 0, 1), (document, 0, 2)]
    first, kept, nothing = Pooler(loaded(), sentence).pool(hidden, batch_of(entries, ids)).embeddings
    np.testing.assert_allclose(first, torch.nn.functional.normalize(hidden[[0, 2]], dim=-1).numpy(), atol=1e-6)
    assert kept.shape == (1, WIDTH) and nothing.shape == (0, WIDTH)
    (nothing,) = Pooler(loaded(), sentence).pool(hidden[5:], batch_of([(document, 0, 2)], ids[5:])).embeddings
    assert nothing.shape == (0, WIDTH)
    everywhere = SentenceSettings(PoolingType.MEAN, True, late=LateSettings((5,), True, None, None, {}))
    (none,) = Pooler(loaded(), everywhere).pool(hidden[3:4], batch_of([(query, 0, 1)], ids[3:4])).embeddings
    assert none.shape == (0, WIDTH)


def test_a_vector_has_the_same_bits_whatever_shares_its_batch():
    sentence = settings(projected=True)
    pooler = Pooler(loaded(torch.bfloat16), sentence)
    hidden = torch.randn(400, WIDTH, generator=torch.Generator().manual_seed(7)).bfloat16()
    requests = [
        EmbedRequest([], PoolingType.MEAN, True, OUT),
        EmbedRequest([], PoolingType.MEAN, True, OUT, kind=EmbeddingKind.PER_TOKEN),
    ]
    together = pooler.pool(hidden, batch_of([(requests[i % 2], 0, 10) for i in range(40)])).embeddings
    for place, expected in enumerate(together):
        piece = hidden[place * 10 : place * 10 + 10]
        (alone,) = pooler.pool(piece, batch_of([(requests[place % 2], 0, 10)])).embeddings
        np.testing.assert_array_equal(alone, expected)


def test_files_that_contradict_the_model_are_refused():
    sentence = settings(projected=False, rows_width=(WIDTH + 1, Path("1_Pooling/config.json")))
    with pytest.raises(ModelLoadError, match=r"1_Pooling.config\.json: takes rows of 25, but SmallModel gives 24"):
        Pooler(loaded(), sentence)
