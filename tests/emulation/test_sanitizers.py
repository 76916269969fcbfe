"""Every kernel at small odd sizes under AddressSanitizer with UndefinedBehaviorSanitizer, and under ThreadSanitizer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.emulation import attention_calls, calls
from tests.emulation.harness import REVERSE, Emulation, Replay
from tests.emulation.test_attention import packed, paged
from tests.emulation.test_pool import batch
from tests.emulation.test_sample import extras, parameters
from tests.emulation.test_scores import problem, some_labels
from tests.emulation.test_sparse import starts_of


def pool(call: calls.Call, dtype: torch.dtype) -> list[torch.Tensor]:
    arguments = batch([1, 5, 33, 2], 19)
    # Wider than the block's threads take at once.
    wide = batch([1, 2], 4101)
    return [
        calls.pool(call, torch.randn(41, 19).to(dtype), *arguments),
        calls.pool(call, torch.randn(3, 4101).to(dtype), *wide),
    ]


def scores(call: calls.Call, dtype: torch.dtype) -> list[torch.Tensor]:
    x, w, b = problem(9, 67, 33, dtype)
    ids, starts = some_labels(9, 67)
    return [
        calls.labels(call, x, w, b, ids, starts),
        calls.labels(call, x, w, None, ids, starts, torch.rand(9) + 0.3, softcap=4.0),
        calls.stream(call, x, w, b, ids, starts, softcap=4.0),
        calls.stream(call, x, w, b, tile_rows=64),
    ]


def sparse(call: calls.Call, dtype: torch.dtype) -> list[torch.Tensor]:
    starts, hidden = starts_of([1, 20, 5]), torch.randn(26, 13).to(dtype)
    weight, token_ids = torch.randn(67, 13).to(dtype), torch.randint(0, 9, (26,))
    # More rows and more sequences than a block has threads.
    many, long = starts_of([600] + [1] * 300), torch.randint(0, 3, (900,))
    return [
        calls.pool_sparse(call, hidden, starts, weight, torch.randn(67)),
        calls.pool_sparse(call, hidden, starts, weight, tile_rows=64),
        *calls.lexical_weights(call, hidden, starts, token_ids, weight[0].clone(), 0.1, torch.tensor([1, 5])),
        *calls.delimiter_rows(call, token_ids, starts, 2),
        *calls.delimiter_rows(call, long, many, 2),
    ]


def sample(call: calls.Call, dtype: torch.dtype) -> list[torch.Tensor]:
    logits = (torch.randn(3, 1101) * 3).to(dtype)
    return [
        *calls.sample(call, logits, *parameters(3), top_logprobs=5, **extras(3, 1101)),
        # So few columns that penalties and bias meet.
        *calls.sample(call, logits[:2, :60].contiguous(), *parameters(2), **extras(2, 60)),
    ]


def attention(call: calls.Call, dtype: torch.dtype) -> list[torch.Tensor]:
    own = packed([1, 17, 66], (4, 2, 7, 5), dtype)
    # Few rows of two splits, a window that ends within a block of keys, heads wider than the stage.
    pages = paged([1, 2], [600, 5], 17, (2, 1, 72, 8), dtype)
    caches = [torch.zeros(3, 5, 2, width).to(dtype) for width in (7, 5)]
    attention_calls.store_kv(call, *(t[:9].contiguous() for t in own[1:3]), torch.arange(9) + 4, *caches)
    attention_calls.copy_blocks(call, *caches, torch.tensor([[1, 0], [9, 1]]))
    own[:3] = [t.contiguous() for t in own[:3]]
    pages[0] = pages[0].contiguous()
    return [
        attention_calls.packed_attention(call, *own, causal=False, window_left=3, window_right=2, scale=0.3),
        attention_calls.paged_attention(call, *pages, scale=0.3, softcap=5.0, rows_each=1, split=True),
        attention_calls.paged_attention(call, *pages, scale=0.3, sinks=torch.ones(2)),
        *caches,
    ]


GROUPS = [pool, scores, sparse, sample, attention]


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_no_access_outside_and_nothing_undefined(
    address: Replay, emulation: Emulation, group: Callable[..., list[torch.Tensor]], dtype: torch.dtype
) -> None:
    assert_same(address, emulation, group, dtype)


@pytest.mark.parametrize("group", GROUPS)
def test_no_race(thread: Replay, emulation: Emulation, group: Callable[..., list[torch.Tensor]]) -> None:
    thread.order = REVERSE
    assert_same(thread, emulation, group, torch.float32)


def test_starts_that_make_no_sense_write_nothing_outside(address: Replay) -> None:
    ids, hidden = torch.ones(10, dtype=torch.int64), torch.ones(10, 4)
    for bounds in ([0, 10, 0, 10, 0, 10], [-5, 40], [90, 99], [7, 3]):
        starts = torch.tensor(bounds).int()
        own = [torch.full((len(bounds) - 1,), value, dtype=torch.int32) for value in (2, 4)]
        calls.delimiter_rows(address, ids, starts, 1)
        calls.lexical_weights(address, hidden, starts, torch.arange(10), hidden[0].clone(), 0.0, ids[:1].clone())
        calls.pool_sparse(address, hidden, starts, hidden)
        calls.pool(address, hidden, starts, *own, own[0] > 0)
        labels = torch.zeros(10, dtype=torch.int64)
        calls.labels(address, hidden[: len(bounds) - 1].clone(), hidden, None, labels, starts)
        rows = hidden[:, None].contiguous()
        attention_calls.packed_attention(address, rows, rows, rows, starts, scale=0.5)
        table = torch.zeros(len(bounds) - 1, 2, dtype=torch.int32)
        caches = [torch.ones(2, 5, 1, 4) for _ in range(2)]
        attention_calls.paged_attention(address, rows, *caches, starts, own[1], table, scale=0.5, split=True)


def assert_same(
    sanitized: Replay, emulation: Emulation, group: Callable[..., list[torch.Tensor]], dtype: torch.dtype
) -> None:
    answers = []
    for call in (sanitized, emulation):
        torch.manual_seed(3)
        answers.append(group(call, dtype))
    for a, b in zip(*answers, strict=True):
        assert torch.allclose(a.double(), b.double(), atol=1e-6, rtol=0, equal_nan=True)
