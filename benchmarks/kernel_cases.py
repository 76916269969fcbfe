"""What ``kernel_bench.py`` measures: each compiled op beside plain torch expressions of the same thing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch.nn import functional
from workload import make_workload

from pyruntime.ops import attention, linear, pooling, quantized, sampling, scores

Run = Callable[[], object]


@dataclass
class Case:
    """``ours`` against ``plain`` (name → expression; those in ``compilable`` also through torch.compile).

    ``target``: how many times faster it must be than ``against``, or than the fastest of ``plain`` where that is not
    given; ``bytes``: what it has to read.
    """

    name: str
    ours: Run
    plain: dict[str, Run]
    target: float | None = None
    against: str | None = None
    compilable: tuple[str, ...] = ()
    bytes: int = 0
    notes: dict[str, object] = field(default_factory=dict)


def _starts(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def embed_lengths() -> list[int]:
    """Rows of 64 texts of the embed workload: a word each, and the two special tokens."""
    return [len(text.split()) + 2 for text in make_workload().embed_texts[:64]]


def pool_case() -> Case:
    lengths = embed_lengths()
    count, starts = len(lengths), _starts(lengths)
    hidden = torch.randn(sum(lengths), 384).bfloat16()
    kinds, widths = torch.full((count,), 2, dtype=torch.int32), torch.full((count,), 384, dtype=torch.int32)
    normalize, offsets = torch.ones(count, dtype=torch.bool), starts.long()
    sequence = torch.repeat_interleave(torch.arange(count), torch.tensor(lengths))
    counts, bounds = torch.tensor(lengths)[:, None], list(pairwise(starts.tolist()))

    def index_add() -> torch.Tensor:
        sums = torch.zeros(count, 384).index_add_(0, sequence, hidden.float())
        return functional.normalize(sums / counts, dim=1)

    def segments() -> torch.Tensor:
        return functional.normalize(torch.segment_reduce(hidden.float(), "mean", offsets=offsets, axis=0), dim=1)

    def loop() -> torch.Tensor:
        return functional.normalize(torch.stack([hidden[a:b].mean(0, dtype=torch.float32) for a, b in bounds]), dim=1)

    def product() -> torch.Tensor:
        chosen = (sequence[None] == torch.arange(count)[:, None]).bfloat16()
        return functional.normalize((chosen @ hidden).float() / counts, dim=1)

    plain: dict[str, Run] = {"index_add": index_add, "segment_reduce": segments, "loop": loop, "product": product}
    return Case(
        f"pool: mean and L2 of {count} texts, 384 wide, bfloat16",
        lambda: pooling.pool(hidden, starts, kinds, widths, normalize),
        plain,
        target=1.5,
        compilable=("index_add", "product"),
        bytes=hidden.numel() * 2,
    )


def head(vocabulary: int = 262_144, width: int = 640) -> torch.Tensor:
    return (torch.randn(vocabulary, width) * 0.05).bfloat16()


def label_cases(weight: torch.Tensor) -> list[Case]:
    rows, width, count = 64, weight.shape[1], 10
    hidden = torch.randn(rows, width).bfloat16()
    ids = torch.randint(0, weight.shape[0], (rows, count))
    flat, starts, ones = ids.flatten(), (torch.arange(rows + 1) * count).int(), torch.ones(rows)
    every = torch.arange(rows)[:, None]

    def all_logits() -> torch.Tensor:
        return torch.softmax(functional.linear(hidden, weight)[every, ids].float(), -1)

    def gathered() -> torch.Tensor:
        return torch.softmax(torch.einsum("rh,rnh->rn", hidden, weight[ids]).float(), -1)

    def whole() -> torch.Tensor:
        return torch.softmax(functional.linear(hidden, weight).float(), -1)[every, ids]

    def whole_by_normaliser() -> torch.Tensor:
        logits = functional.linear(hidden, weight).float()
        return torch.exp(logits[every, ids] - torch.logsumexp(logits, -1, keepdim=True))

    labels = (hidden, weight, None, flat, starts)
    return [
        Case(
            f"label_scores: 10 labels of {weight.shape[0]}, {rows} rows, against all logits",
            lambda: scores.label_scores(*labels, ones),
            {"linear and gather": all_logits},
            target=20.0,
            compilable=("linear and gather",),
        ),
        Case(
            "label_scores: the same, against gathered label rows",
            lambda: scores.label_scores(*labels, ones),
            {"gather and einsum": gathered},
            compilable=("gather and einsum",),
        ),
        Case(
            f"label_probabilities: whole vocabulary of {weight.shape[0]}, {rows} rows",
            lambda: scores.label_probabilities(*labels),
            {"softmax": whole, "logsumexp": whole_by_normaliser},
            target=1.0,
            compilable=("softmax", "logsumexp"),
        ),
    ]


def sample_case(batch: int = 64, vocabulary: int = 262_144) -> Case:
    logits, ones = torch.randn(batch, vocabulary) * 2, torch.ones(batch)
    top_k, nucleus = torch.full((batch,), 50, dtype=torch.int32), torch.full((batch,), 0.9)
    counters = (torch.arange(batch), torch.arange(batch), torch.zeros(batch, dtype=torch.int32))

    def topk() -> torch.Tensor:
        values, ids = logits.topk(50)
        p = values.softmax(-1)
        before = p.cumsum(-1) - p
        return ids.gather(1, torch.multinomial(p.masked_fill(before >= 0.9, 0), 1))

    def topk_without_multinomial() -> torch.Tensor:
        values, ids = logits.topk(50)
        p = values.softmax(-1)
        p = p.masked_fill(p.cumsum(-1) - p >= 0.9, 0)
        return ids.gather(1, (p / torch.empty_like(p).exponential_()).argmax(-1, keepdim=True))

    return Case(
        f"sample: top-k 50, top-p 0.9 of {vocabulary}, {batch} rows",
        lambda: sampling.sample(logits, ones, top_k, nucleus, ones * 0, *counters),
        {"topk, multinomial": topk, "topk, exponential": topk_without_multinomial},
        target=5.0,
        compilable=("topk, exponential",),
        bytes=logits.numel() * 4,
    )


def linear_cases(weight: torch.Tensor) -> list[Case]:
    x = torch.randn(1, weight.shape[1]).bfloat16()
    small = weight[:65_536].float()
    packed = quantized.pack_int8(small)
    rows = small.bfloat16()
    return [
        Case(
            f"linear_rows: one row, {weight.shape[0]} columns, bfloat16",
            lambda: linear.linear_rows(x, weight),
            {"linear": lambda: functional.linear(x, weight)},
            compilable=("linear",),
            bytes=weight.numel() * 2,
            notes={"bandwidth_target": 0.85},
        ),
        Case(
            f"linear_int8: one row, {small.shape[0]} columns, against bfloat16 weights",
            lambda: quantized.linear_int8(x, packed, small.shape[0]),
            {"linear": lambda: functional.linear(x, rows)},
            bytes=packed.numel(),
        ),
    ]


def embed_attention_case() -> Case:
    lengths = embed_lengths()
    starts, total = _starts(lengths), sum(lengths)
    q, k, v = (torch.randn(1, 12, total, 32).bfloat16() for _ in range(3))
    packed = [t[0].transpose(0, 1) for t in (q, k, v)]
    bounds = list(pairwise(starts.tolist()))
    longest, count = max(lengths), len(lengths)
    padded = [torch.randn(count, 12, longest, 32).bfloat16() for _ in range(3)]
    visible = (torch.arange(longest)[None] < torch.tensor(lengths)[:, None])[:, None, None]

    def loop() -> torch.Tensor:
        parts = [functional.scaled_dot_product_attention(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b]) for a, b in bounds]
        return torch.cat(parts, 2)

    return Case(
        f"attention: {count} texts of the embed workload, 12 heads of 32, bfloat16",
        lambda: attention.packed_attention(*packed, starts, causal=False, scale=32**-0.5),
        {"sdpa loop": loop, "sdpa padded": lambda: functional.scaled_dot_product_attention(*padded, visible)},
        target=1.5,
        against="sdpa loop",
    )


def decode_attention_case(streams: int = 64, length: int = 512) -> Case:
    blocks = streams * length // 16
    caches = [torch.randn(blocks, 16, 1, 256).bfloat16() for _ in range(2)]
    tables = torch.randperm(blocks).view(streams, -1).int().contiguous()
    q, starts = torch.randn(streams, 4, 256).bfloat16(), torch.arange(streams + 1).int()
    lengths = torch.full((streams,), length, dtype=torch.int32)
    # Torch has its keys side by side already: what it would take to gather pages is not counted against it.
    k, v = (torch.randn(streams, 1, length, 256).bfloat16() for _ in range(2))
    queries = q[:, :, None]

    def loop() -> torch.Tensor:
        attend = functional.scaled_dot_product_attention
        parts = [attend(queries[i : i + 1], k[i : i + 1], v[i : i + 1], enable_gqa=True) for i in range(streams)]
        return torch.cat(parts)

    def products() -> torch.Tensor:
        weights = torch.softmax((q @ k[:, 0].transpose(1, 2)).float() / 16, -1).bfloat16()
        return weights @ v[:, 0]

    plain: dict[str, Run] = {
        "sdpa loop": loop,
        "sdpa batched": lambda: functional.scaled_dot_product_attention(queries, k, v, enable_gqa=True),
        "batched products": products,
    }
    return Case(
        f"attention: decode of {streams} streams at {length} keys, 4 heads of 256 on one, pages of 16",
        lambda: attention.paged_attention(q, *caches, starts, lengths, tables, scale=1 / 16),
        plain,
        target=3.0,
        against="sdpa loop",
        bytes=2 * streams * length * 256 * 2,
    )


def classify_case() -> Case:
    """A cross-encoder's head, for which there is no kernel: what a perfect one could win is the time of the calls."""
    pooled, dense, bias = torch.randn(64, 384), torch.randn(384, 384), torch.randn(384)
    out, out_bias = torch.randn(1, 384), torch.randn(1)

    def plain() -> torch.Tensor:
        return functional.linear(torch.tanh(functional.linear(pooled, dense, bias)), out, out_bias)

    return Case("classification head in plain torch (its product alone as the yardstick)",
                lambda: functional.linear(pooled, dense, bias), {"head": plain}, compilable=("head",))  # fmt: skip


def all_cases() -> list[Case]:
    weight = head()
    return [
        pool_case(),
        *label_cases(weight),
        sample_case(),
        *linear_cases(weight),
        embed_attention_case(),
        decode_attention_case(),
        classify_case(),
    ]
