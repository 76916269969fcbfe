"""What the launchers promise: graphs capture them, other streams work, bad arguments raise, opcheck passes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from pyruntime.ops import pooling, sampling, scores

OPS = torch.ops.pyruntime


def cases() -> dict[str, tuple[Callable, tuple]]:
    """A small call of every op with a CUDA kernel."""
    starts = torch.tensor([0, 3, 4]).int().cuda()
    hidden, weight = torch.randn(4, 8).cuda(), torch.randn(70, 8).cuda()
    rows, ids = hidden[:2].clone(), torch.tensor([1, 8, 3, 3]).cuda()
    one, kinds = torch.ones(2).cuda(), torch.zeros(2).int().cuda()
    zeros = torch.zeros(2, dtype=torch.int64).cuda()
    q, kv, caches = torch.randn(4, 4, 8).cuda(), torch.randn(4, 2, 8).cuda(), torch.zeros(2, 3, 2, 2, 8).cuda()
    slots, lengths = torch.tensor([0, 3, 4, 5]).cuda(), torch.tensor([4, 1]).int().cuda()
    tables, pairs = torch.tensor([[0, 1], [2, -1]]).int().cuda(), torch.tensor([[0, 1]]).cuda()
    attend = (True, 0.3, -1)
    return {
        "packed_attention": (OPS.packed_attention, (q, kv, kv, starts, *attend, -1, 0.0, None)),
        "paged_attention": (OPS.paged_attention, (q, *caches, starts, lengths, tables, *attend, 0.0, None)),
        "store_kv": (OPS.store_kv, (kv, kv, slots, *caches)),
        "copy_blocks": (OPS.copy_blocks, (*caches, pairs)),
        "pool": (OPS.pool, (hidden, starts, kinds, kinds + 8, one > 0)),
        "pool_sparse": (OPS.pool_sparse, (hidden, starts, weight)),
        "lexical_weights": (OPS.lexical_weights, (hidden, starts, ids, weight[0].clone(), 0.1, zeros)),
        "delimiter_rows": (OPS.delimiter_rows, (ids, starts, 3)),
        "label_logits": (OPS.label_logits, (rows, weight, None, ids, starts)),
        "label_scores": (OPS.label_scores, (rows, weight, None, ids, starts, one)),
        "label_probabilities": (OPS.label_probabilities, (rows, weight, None, ids, starts)),
        "token_logprobs": (OPS.token_logprobs, (rows, weight, None, ids[:2].clone())),
        "logsumexp": (OPS.logsumexp, (rows, weight, None, 0.0, 1.0)),
        "sample": (OPS.sample, (rows @ weight.T, one, kinds, one, one * 0, zeros, zeros, kinds)),
    }


NAMES = ["packed_attention", "paged_attention", "store_kv", "copy_blocks", "pool", "pool_sparse", "lexical_weights",
         "delimiter_rows", "label_logits", "label_scores", "label_probabilities", "token_logprobs", "logsumexp",
         "sample"]  # fmt: skip


def flat(answer: torch.Tensor | tuple[torch.Tensor, ...] | None) -> list[torch.Tensor]:
    if answer is None:  # it writes into its arguments
        return []
    return [answer] if isinstance(answer, torch.Tensor) else list(answer)


@pytest.mark.parametrize("name", NAMES)
def test_a_graph_captures_it(name: str) -> None:
    op, arguments = cases()[name]
    want = [t.clone() for t in flat(op(*arguments))]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = flat(op(*arguments))
    for t in got:
        t.fill_(1)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    arguments[0].copy_(arguments[0].flip(0))
    want = [t.clone() for t in flat(op(*arguments))]
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name: str) -> None:
    op, arguments = cases()[name]
    torch.library.opcheck(op.default, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("name", NAMES)
def test_another_stream(name: str) -> None:
    op, arguments = cases()[name]
    want = flat(op(*arguments))
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        got = flat(op(*arguments))
        torch.cuda.current_stream().synchronize()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_bad_arguments_raise() -> None:
    all_cases = cases()
    hidden, starts, kinds, dimensions, normalize = all_cases["pool"][1]
    with pytest.raises(RuntimeError, match=r"kinds: expected shape \[2\]"):
        pooling.pool(hidden, starts, kinds[:1], dimensions, normalize)
    with pytest.raises(RuntimeError, match="kinds: expected dtype Int"):
        pooling.pool(hidden, starts, kinds.long(), dimensions, normalize)
    with pytest.raises(RuntimeError, match="starts: expected a tensor on the device"):
        pooling.pool(hidden, starts.cpu(), kinds, dimensions, normalize)
    rows, weight, _, ids, bounds = all_cases["label_logits"][1]
    with pytest.raises(RuntimeError, match="weight: expected the dtype of rows"):
        scores.label_logits(rows, weight.half(), None, ids, bounds)
    with pytest.raises(RuntimeError, match="weight: expected shape"):
        scores.logsumexp(rows, weight[:, :7])
    for bad in (1e-31, 1e31, 1e39, -1.0):
        with pytest.raises(RuntimeError, match="softcap: must be 0"):
            scores.logsumexp(rows, weight, softcap=bad)
    for bad in (1e39, 1e-39, float("nan")):
        with pytest.raises(RuntimeError, match="scale: must be finite"):
            scores.logsumexp(rows, weight, scale=bad)
    with pytest.raises(RuntimeError, match="the last dimension must be contiguous"):
        scores.logsumexp(rows.T.contiguous().T, weight)
    with pytest.raises(RuntimeError, match="top_logprobs: expected -1 to 70"):
        sampling.sample_with_logprobs(*all_cases["sample"][1], top=71)


def test_wrong_values_answer_nan_and_fault_nothing() -> None:
    rows, weight, _, ids, starts = cases()["label_logits"][1]
    assert scores.label_logits(rows, weight, None, ids + 69, starts).isnan().all()
    hidden, bounds, kinds, dimensions, normalize = cases()["pool"][1]
    assert pooling.pool(hidden, bounds + 100, kinds, dimensions, normalize).isnan().all()
    torch.cuda.synchronize()
