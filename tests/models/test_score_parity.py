"""Label probabilities of real Gemma weights against transformers eager in float32."""

import pytest
import torch

from pyruntime.types import ScoreRequest
from tests.models.texts import text

LABELS = [" yes", " no", " maybe", "7"]


@pytest.fixture(scope="module")
def gemma(served):
    return served("gemma-3-270m", "float32")


@pytest.fixture(scope="module")
def labels(gemma):
    ids = [gemma.tokenizer.encode(label, special_tokens=False) for label in LABELS]
    assert all(len(each) == 1 for each in ids)
    return [each[0] for each in ids]


@pytest.fixture(scope="module")
def work(gemma):
    """A prefix of 400 words and 64 items of 1 to 40 words."""
    prefix = gemma.tokenizer.encode(text(1, 400))
    items = [gemma.tokenizer.encode(" " + text(100 + i, 1 + i % 40), special_tokens=False) for i in range(64)]
    return prefix, items


def expected(logits, labels, apply_softmax, temperature=1.0):
    if apply_softmax:
        return torch.softmax(logits[labels] / temperature, dim=-1)
    return torch.softmax(logits, dim=-1)[labels]


async def test_items_behind_a_shared_prefix(gemma, gemma_eager, labels, work):
    prefix, items = work
    prefix = gemma.tokenizer.encode("for the first time") + prefix[1:]
    places = range(0, 64, 9)
    logits = [gemma_eager(torch.tensor([prefix + items[i]]), logits_to_keep=1).logits[0, -1].double() for i in places]
    for apply_softmax, temperature in ((True, 1.0), (True, 0.5), (False, 1.0)):
        results, _ = await gemma.engine.score(ScoreRequest(prefix, items, labels, apply_softmax, temperature))
        assert [r.prompt_tokens for r in results] == [len(prefix) + len(item) for item in items]
        if (apply_softmax, temperature) == (True, 1.0):  # computed once: only the first item pays for the prefix
            assert [r.cached_tokens for r in results] == [0] + [len(prefix)] * 63
        for index, row in zip(places, logits, strict=True):
            wanted = expected(row, labels, apply_softmax, temperature)
            torch.testing.assert_close(torch.tensor(results[index].scores).double(), wanted, atol=1e-4, rtol=0)


async def test_alone_equals_behind_the_prefix(gemma, labels, work):
    prefix, items = work
    together, _ = await gemma.engine.score(ScoreRequest(prefix, items[:5], labels, True))
    for item, shared in zip(items, together, strict=False):
        (alone,), _ = await gemma.engine.score(ScoreRequest(prefix, [item], labels, True))
        torch.testing.assert_close(torch.tensor(alone.scores), torch.tensor(shared.scores), atol=1e-5, rtol=0)


async def test_a_repeated_query_comes_from_the_cache_and_scores_the_same(gemma, labels, work):
    prefix, items = work
    request = ScoreRequest(gemma.tokenizer.encode("once more") + prefix[1:], items[:3], labels, True)
    first, _ = await gemma.engine.score(request)
    second, _ = await gemma.engine.score(request)
    block = 16
    assert first[0].cached_tokens == 0
    assert second[0].cached_tokens == (len(request.prefix) - 1) // block * block
    for before, after in zip(first, second, strict=True):
        torch.testing.assert_close(torch.tensor(after.scores), torch.tensor(before.scores), atol=1e-5, rtol=0)


async def test_blocks_return(gemma, labels, work):
    await gemma.engine.score(ScoreRequest(*work, labels, True))
    assert gemma.engine.num_blocks_used == 0
